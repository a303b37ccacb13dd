"""Pure graders: a prompt and a reply in, a Grade out. They never raise for a bad answer, and never give 0 for an error."""
