"""Sandboxes for untrusted programs. Modules here import only the standard library, as the sandboxed processes have no more."""
