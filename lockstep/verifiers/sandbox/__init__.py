"""Sandboxes for untrusted programs. Modules here need only the standard library: they are loaded into bare processes."""
