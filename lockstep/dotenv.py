"""Reads environment variables from a file: .env in the current folder, or the file that LOCKSTEP_ENV_FILE names."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

from lockstep.errors import ConfigError

VARIABLE = "LOCKSTEP_ENV_FILE"


def read_env(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables of the file that the environment does not have yet; the names, never the values, go to stderr.

    An empty LOCKSTEP_ENV_FILE reads none. Returns the names. Raises ConfigError for a named file that is not there.
    """
    named = environment.get(VARIABLE)
    path = Path(named or ".env")
    if named == "" or not path.is_file():
        if named:
            raise ConfigError([f"{VARIABLE}={named}: there is no such file"], fix=f"correct {VARIABLE}, or unset it")
        return []
    from dotenv import dotenv_values

    found = {name: value for name, value in dotenv_values(path).items() if value and not environment.get(name)}
    environment.update(found)
    if found:
        print(f"from {path}: {', '.join(found)}", file=sys.stderr)
    return list(found)
