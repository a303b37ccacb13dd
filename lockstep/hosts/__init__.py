"""Runs commands on spare machines over ssh: sends the files that are not there yet, by their hash; fetches and checks results."""
