"""The `lockstep` command. Each subcommand is a module of lockstep.commands with `add_parser(subparsers)` and `run(args) -> int`.

Command modules are fast to import: torch and other large packages are imported inside `run`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.util
import io
import logging
import os
import re
import select
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from lockstep import __version__
from lockstep.dotenv import read_env
from lockstep.errors import LockstepError
from lockstep.openmp import leave_out_tiles, set_waiting
from lockstep.text import did_you_mean, hide_values, visible

COMMANDS = (
    "doctor",
    "plan",
    "preflight",
    "train",
    "eval",
    "compare",
    "ab",
    "reproduce",
    "runs",
    "attempt",
    "host",
    "probe",
    "audit",
    "sample",
    "serve",
    "export",
    "import",
    "rollouts",
    "report",
    "view",
    "diagnose",
    "track",
    "metrics",
    "data",
    "config",
)
"""Names of the modules in lockstep.commands, in the order of the help."""

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
PIPE_CLOSED = 141
"""128 + SIGPIPE."""
OUTPUT_FAILED = 74
"""The output cannot be written, as to a full disk; EX_IOERR of sysexits.h."""


class Visible(logging.Formatter):
    """Log lines in which the control characters of file names and texts are shown, not obeyed."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class Parser(argparse.ArgumentParser):
    """Takes recipes and settings before and after options, and names the nearest choice for a word that is not a choice."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, which takes the words of a list only where the first of them stand."""
        found, rest = super().parse_known_args(args, namespace)
        lists = [a.dest for a in self._actions if not a.option_strings and a.nargs in ("*", "+") and not a.choices]
        if lists and not any(word.startswith("-") for word in rest):
            setattr(found, lists[-1], [*getattr(found, lists[-1]), *rest])
            rest = []
        if rest and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(rest)}")  # here, where the command's own options are known
        return found, rest

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and str(value) not in choices:
            hint = did_you_mean(str(value), choices, f"choose from {', '.join(choices)}", cutoff=0.5)
            raise argparse.ArgumentError(action, f"there is no {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        """Say for an unknown option how the setting is written that was meant, or the nearest option of the command."""
        match = re.fullmatch(r"unrecognized arguments: --(set[ =](?=[\w.]+=))?([\w.]+)(?:[ =](\S+))?(?: .*)?", message)
        if match is None:
            super().error(message)
        from lockstep.config.help import groups
        from lockstep.config.search import nearest

        known = {setting.path for group in groups() for setting in group.settings}
        options = [option[2:] for action in self._actions for option in action.option_strings if option[:2] == "--"]
        near = difflib.get_close_matches(match[2], options, n=1, cutoff=0.65)
        takes_settings = any("=" in str(a.metavar) for a in self._actions if not a.option_strings)
        name = match[2] if match[2] in known else "" if near else next(iter(nearest(match[2])), "")
        if takes_settings and name:
            hint = f"a setting is written without dashes: write {name}={match[3] or 'VALUE'}"
        else:
            hint = f"did you mean --{near[0]}?" if near else f"see {self.prog} --help"
        self.exit(2, f"lockstep: there is no option --{'set' if match[1] else match[2]}; {hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for wrong usage, an error's own `exit_code`, 130 when interrupted,
    141 and 74 if the output is closed or cannot be written."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show π must not end a run
    set_waiting(os.environ)
    leave_out_tiles(os.environ)
    try:
        read_env(os.environ)
        code = _run(argv)
        print(end="", flush=True)  # a closed pipe is noticed here, not at exit
        return code
    except LockstepError as error:
        print(f"lockstep: {hide_values(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return PIPE_CLOSED
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(
                f"lockstep: {visible(str(error.filename))}: no file can have so long a name; correct it",
                file=sys.stderr,
            )
            return 2
        if not _stdout_fails():
            raise
        print(f"lockstep: the output cannot be written: {error.strerror}", file=sys.stderr)
        return OUTPUT_FAILED


def commands(names: Sequence[str] = COMMANDS) -> dict[str, ModuleType]:
    """Return the command modules by name."""
    names = [name for name in names if importlib.util.find_spec(f"lockstep.commands.{name}")]
    return {name: importlib.import_module(f"lockstep.commands.{name}") for name in names}


def _run(argv: Sequence[str] | None) -> int:
    first = next(iter(sys.argv[1:] if argv is None else argv), "")
    # The modules of other commands matter only to the list of all.
    modules = commands((first,) if first in COMMANDS else () if first == "--version" else COMMANDS)
    parser = Parser(
        prog="lockstep", description="Post-train language models by reinforcement learning with verifiable rewards."
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    subparsers = parser.add_subparsers(dest="lockstep_command", metavar="COMMAND", required=True)
    for module in modules.values():
        module.add_parser(subparsers)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed help, version or what is wrong
        return stop.code if isinstance(stop.code, int) else 0
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Visible("%(message)s"))
    logging.getLogger("lockstep").setLevel(logging.INFO)  # a download that takes a minute must say so
    return int(modules[args.lockstep_command].run(args))


def _open_standard_streams() -> None:
    """Put /dev/null in the place of streams that the shell closed (`>&-`): else a file of the run would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _stdout_fails() -> bool:
    """True if the output takes no byte more; then nothing is written there, not even at exit."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _stdout_is_closed() -> bool:
    """Return True if the reader of our output has gone (`| head`); then nothing more is written, not even at exit."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
