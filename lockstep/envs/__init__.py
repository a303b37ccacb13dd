"""Environments of several turns: tools, games, and the driver that plays them through an engine."""
