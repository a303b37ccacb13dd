"""Environments of several turns: tools, games, and their runners."""
