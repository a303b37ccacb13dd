"""Reads the user's spare machines from `hosts:` in the file $LOCKSTEP_CONFIG, or else in ~/.config/lockstep/hosts.yaml.

    hosts:
      spare: {ssh: me@spare, folder: /data/lockstep, lock: requirements/cuda.lock}

Aliases, keys, ports and jump hosts are those of ssh's own configuration.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from lockstep.config.section import Section
from lockstep.config.text import read
from lockstep.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
ADDRESS = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9][\w.-]*")


def _address(value: str) -> str:
    if not ADDRESS.fullmatch(value):
        raise ValueError("write an alias, machine or user@machine; ports and keys belong in the configuration of ssh")
    return value


def _word(value: str) -> str:
    if not value or any(character in value for character in "'\"\\\n\0"):
        raise ValueError("must not be empty, nor have quotes, backslashes or line ends")
    return value


Word = Annotated[str, AfterValidator(_word)]


class Host(Section):
    """A machine that is reached by ssh."""

    ssh: Annotated[str, AfterValidator(_address)]
    """Alias of ssh's configuration, machine, or user@machine. Without this line it is the host's name."""
    folder: Word = "lockstep-host"
    """Folder on that machine for all that is sent and made there; relative to the home folder."""
    python: Word = "python3"
    """Python there, 3.11 or newer. With `lock` it makes the environment; without, it must have the packages itself."""
    lock: str | None = None
    """Lock file (on this machine) from which an environment is built there. null: that machine's Python is used and checked."""
    torch: tuple[str, ...] = ()
    """Arguments of pip that install torch there first. Example: ["torch==2.13.0", "--index-url", "…/cpu"]"""
    pip: tuple[str, ...] = ()
    """More arguments of pip there. Example: ["--find-links", "/data/wheels"]"""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of commands there. Nothing of this machine's environment is sent."""
    options: tuple[Word, ...] = ()
    """More options of ssh. Example: ["-F", "/home/me/spare_config"]"""
    limit: Annotated[int, Field(gt=0)] | None = None
    """Largest rate of transfers, in KiB a second."""
    project: bool = False
    """Send all files of this git repository that it tracks or would, besides those that the command names."""


def config_path() -> Path:
    """Return the user's file; it need not exist."""
    return Path(os.environ.get("LOCKSTEP_CONFIG") or "~/.config/lockstep/hosts.yaml").expanduser()


def hosts() -> dict[str, Host]:
    """Return the user's machines by name. Raises ConfigError, naming the file, for a file that is missing or wrong."""
    path = config_path()
    example = (
        "list your machines in that file (hosts: {spare: {ssh: user@machine}}), or set LOCKSTEP_CONFIG to another file"
    )
    if not path.exists():
        raise ConfigError([f"{path}: there is no such file"], where="hosts", fix=example)
    document = read(path)
    if document.mistakes:
        raise ConfigError(document.mistakes, where="hosts", fix="correct the file")
    found = document.value.get("hosts") if isinstance(document.value, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConfigError([f"{path}: the file lists no machines under `hosts`"], where="hosts", fix=example)
    return {name: _host(path, name, value) for name, value in found.items()}


def host_of(name: str) -> Host:
    """Return the machine of this name. Raises ConfigError, naming those that there are."""
    known = hosts()
    if name not in known:
        raise ConfigError([f"there is no host {name!r} in {config_path()}"], fix=f"choose from {', '.join(known)}")
    return known[name]


def _host(path: Path, name: str, value: object) -> Host:
    if not NAME.fullmatch(name):
        raise ConfigError([f"{path}: hosts.{name}: a name has letters, digits, dots and dashes"])
    try:
        return Host.model_validate_json(
            json.dumps({"ssh": name} | (value if isinstance(value, dict) else {})), strict=True
        )
    except ValidationError as error:
        lines = [f"{path}: hosts.{name}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(lines) from None
