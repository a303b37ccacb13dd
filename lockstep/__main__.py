"""Starts the command line for `python -m lockstep`."""

from __future__ import annotations

from lockstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
