"""The command line as a shell sees it: exit codes, streams, what it imports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args

import pytest

import lockstep
from lockstep import cli
from lockstep.cli import COMMANDS, main
from lockstep.commands import train
from lockstep.commands.eval import ROLES
from lockstep.config.evaluate import Role
from lockstep.errors import HealthStop

ROOT = Path(__file__).parents[1]
PRESENT = sorted(path.stem for path in (ROOT / "lockstep" / "commands").glob("*.py") if path.stem != "__init__")


def shell(*args: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "lockstep"]), *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=600)


def test_every_command_module_is_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(PRESENT) <= set(COMMANDS)
    assert sorted(cli.commands()) == PRESENT
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in PRESENT)


@pytest.mark.parametrize("name", PRESENT)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: lockstep {name}")


def test_starting_loads_nothing_heavy() -> None:
    code = (
        "import sys; from lockstep.cli import commands, main; commands(); code = main(sys.argv[1:])\n"
        "print(code, sorted({'torch', 'transformers', 'numpy', 'peft', 'pyarrow', 'rich'} & sys.modules.keys()))"
    )
    result = shell("config", "check", "smoke", code=code)
    assert result.stdout.splitlines()[-1] == "0 []", result.stderr


@pytest.mark.parametrize("name", ["plan", "doctor", "preflight", "train"])
def test_a_wrong_setting_is_told_before_torch_is_loaded(name: str) -> None:
    code = "import sys; from lockstep.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    result = shell(name, "smoke", "optimizer.lrr=1", code=code)
    assert result.stdout.splitlines()[-1] == "2 False", result.stderr
    assert "did you mean optimizer.lr?" in result.stderr


@pytest.mark.parametrize(
    ("by_user", "found"),
    [
        ({}, ("PASSIVE None", "None 10000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE None",)),
        ({"GOMP_SPINCOUNT": "7"}, ("None 7",)),
    ],
)
def test_waiting_threads_spin_briefly_or_sleep_unless_the_user_says_otherwise(
    by_user: dict[str, str], found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP reads the variables when torch is loaded; a child process inherits them."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
        if name in by_user:
            monkeypatch.setenv(name, by_user[name])
    child = "import os; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
    code = (
        "import subprocess, sys; from lockstep.cli import main; main(['config', 'check', 'smoke'])\n"
        f"print('torch' in sys.modules, flush=True); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    result = shell(code=code)
    loaded, waiting = result.stdout.splitlines()[-2:]
    assert (loaded, waiting in found) == ("False", True), result.stderr


def test_version_goes_to_stdout() -> None:
    result = shell("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"lockstep {lockstep.__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["confg"], "there is no 'confg'; did you mean config?"),
        (["config", "chek", "smoke"], "there is no 'chek'; did you mean check?"),
        (["zzz"], "there is no 'zzz'; choose from"),
        ([], "COMMAND"),
        (["config", "check"], "required"),
        (["config", "show", "smoke", "--frob"], "--frob"),
        (
            ["train", "smoke", "--optimizer.lr=3"],
            "no option --optimizer.lr; a setting is written without dashes: write optimizer.lr=3",
        ),
        (
            ["train", "smoke", "--set", "steps=4", "name=x"],
            "no option --set; a setting is written without dashes: write steps=4\n",
        ),
        (["rollouts", "runs/x", "--steps", "1"], "no option --steps; did you mean --step?\n"),
        (["report", "runs/x", "--out", "x.html"], "no option --out; see lockstep report --help\n"),
        (["train", "smoke", "--num_generations", "3"], "write samples_per_prompt=3\n"),
    ],
)
def test_wrong_usage_exits_2_with_a_hint(args: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert hint in captured.err


def test_errors_are_text_without_traceback() -> None:
    result = shell("config", "check", "smoke", "steps=0")
    assert result.returncode == 2
    assert result.stderr == "lockstep: 1 mistake in smoke steps=0:\n  steps=0: must be at least 1\n"


def command(run: object) -> types.ModuleType:
    module = types.ModuleType("lockstep.commands.probe")
    vars(module).update(add_parser=lambda subparsers: subparsers.add_parser("probe"), run=run)
    return module


def stops(args: object) -> int:
    raise HealthStop("entropy fell to 0", where="step 7", fix="lower optimizer.lr")


def is_interrupted(args: object) -> int:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("SIGINT did not arrive")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("run", "code", "text"),
    [
        (lambda args: 5, 5, ""),
        (stops, 3, "lockstep: step 7: entropy fell to 0\n  to fix: lower optimizer.lr\n"),
        (is_interrupted, 130, "lockstep: interrupted\n"),
    ],
)
def test_a_command_ends_with_its_exit_code(
    run: object, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "commands", lambda names: {"probe": command(run)})
    assert main(["probe"]) == code
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    "command", ["sample", "rollouts", "audit parser", "config translate", "export", "view", "report"]
)
def test_a_name_that_is_too_long_for_a_file_is_told(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), 300 * "a"]) == 2
    assert re.fullmatch(r"lockstep: a{300}\S*: no file can have so long a name; correct it\n", capsys.readouterr().err)


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(args: object) -> int:
        raise BrokenPipeError("of something else than stdout")

    monkeypatch.setattr(cli, "commands", lambda names: {"probe": command(fails)})
    with pytest.raises(BrokenPipeError, match="something else"):
        main(["probe"])


@pytest.mark.parametrize("args", ["config help", "config show smoke"])
def test_a_closed_pipe_ends_quietly(args: str) -> None:
    """`config help` is larger than the output buffer and fails while printing, `config show` fails at the last flush."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lockstep", *args.split()]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=env, timeout=600
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


FULL = (">/dev/full", 74, "lockstep: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("words", "redirection", "code", "says"),
    [
        ("config show smoke", *FULL),
        ("metrics list", *FULL),
        ("--version", *FULL),
        ("config show smoke", ">&-", 0, ""),
        ("metrics list", "<&- >&-", 0, ""),
    ],
)
def test_an_output_that_is_full_or_closed_ends_without_a_traceback(
    words: str, redirection: str, code: int, says: str
) -> None:
    command = f'"{sys.executable}" -m lockstep {words} {redirection}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (code, says)


def test_files_that_are_opened_do_not_take_the_place_of_a_closed_output(tmp_path: Path) -> None:
    program = (
        "import os, sys; from lockstep import cli\n"
        "cli._run = lambda argv: (open(sys.argv[1], 'wb', buffering=0), os.system('echo noise'), print('noise'), 0)[-1]\n"
        "cli.main()"
    )
    subprocess.run(["sh", "-c", f'"{sys.executable}" -c "$0" "$1" >&-', program, str(tmp_path / "metrics")], check=True)
    assert (tmp_path / "metrics").read_bytes() == b""


def test_control_characters_of_files_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    hostile = tmp_path / "a\x1b]0;owned\x07\u202e.yaml"
    hostile.write_text('steps: "\\e[2J"\n"\\e[31m": 1\n')
    result = shell("config", "check", str(hostile))
    assert result.returncode == 2
    assert result.stderr.replace("\n", "").isprintable()
    assert "a\\x1b]0;owned\\x07\\u202e.yaml" in result.stderr
    log = "import logging; from lockstep.cli import main; main(['metrics', 'list']); logging.warning('\\x1b[2J%s', '\\x9b')"
    assert shell(code=log).stderr == "\\x1b[2J\\x9b\n"


def test_settings_may_stand_before_and_after_options() -> None:
    parser = cli.Parser()
    train.add_parser(parser.add_subparsers())
    words = ["smoke", "seed=1", "--allow", "slow_warmup", "steps=3", "--require-clean", "name=x"]
    args = parser.parse_args(["train", *words])
    assert (args.recipe, args.allow, args.require_clean) == (
        ["smoke", "seed=1", "steps=3", "name=x"],
        ["slow_warmup"],
        True,
    )
    with pytest.raises(SystemExit):  # the word is the option's value, as far as anyone knows
        parser.parse_args(["train", "smoke", "--frob", "steps=3"])


def test_a_number_of_lines_that_shows_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "tail", "spare", "job", "-n", "0"]) == 2
    assert "-n/--lines" in capsys.readouterr().err


def test_the_roles_of_an_option_are_those_of_the_settings() -> None:
    assert get_args(Role) == ROLES
