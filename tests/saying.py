"""What `lockstep` says when it is called in this process: the fixture `said` of the tests of commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Said: TypeAlias = Callable[..., tuple[int, str, str]]
"""From the words of a command to its exit code, output and errors. Example: said("eval", run, "--no-base")"""
Told: TypeAlias = Callable[..., tuple[int, str]]
"""As Said, with output and errors in one text."""
Printed: TypeAlias = Callable[..., str]
"""From the words of a command that ends with `code` to its output; to its errors if that is not 0."""
