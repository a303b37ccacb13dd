"""Where programs run that nobody trusts. Modules here need the standard library alone: they are loaded into bare processes."""
