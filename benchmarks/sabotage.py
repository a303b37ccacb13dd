# ruff: noqa: E501
"""Ruined runs and good runs: which of them are stopped or named within ten steps, with the right remedy.

`python -m benchmarks.sabotage` runs all of them on a CPU with a tiny model (about ten minutes), `python -m benchmarks.sabotage NAME …`
some. Each result is kept in benchmarks/results/sabotage.jsonl; docs/sabotage.md is written from the latest of each run. The runs are in
sabotage_cases.py, the faults in sabotage_faults.py, the files of a run in sabotage_files.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sabotage_cases import BAD, GOOD, UNSEEN, Case
from benchmarks.sabotage_files import write_files
from lockstep.build.parts import Parts
from lockstep.config.load import load
from lockstep.errors import LockstepError
from lockstep.loops import start
from lockstep.run.session import Session
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_events, read_metrics
from lockstep.types import Metrics

PAGE = Path(__file__).parents[1] / "docs" / "sabotage.md"
RESULTS = Path(__file__).parent / "results" / "sabotage.jsonl"
WITHIN = 10
"""Steps within which a ruined run must be stopped or named."""
STEPS = 12
"""Steps after which a run is cut, if it was not stopped before."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case."""

    name: str
    bad: bool
    found: str
    """The rule or error that named it, "" for none."""
    step: int
    stopped: bool
    remedied: bool
    others: tuple[str, ...]
    """Rules that spoke besides."""
    error: str
    seconds: float

    @property
    def right(self) -> bool:
        """A bad run is named in time with its remedy; a good one is not stopped."""
        if not self.bad:
            return not self.stopped
        return bool(self.found) and self.remedied and self.step <= WITHIN


class _Cut(Exception):
    """The run has made its steps."""


@contextlib.contextmanager
def spoiled(case: Case) -> Iterator[None]:
    """Train with the parts of the case, and cut the run after its steps."""
    build, finish = start.place_parts, Session.finish

    def built(*args: Any) -> Parts:
        return case.spoil(build(*args))

    def cut(self: Session, step: int, metrics: Metrics) -> None:
        finish(self, step, metrics)
        if step + 1 >= STEPS:
            raise _Cut

    start.place_parts, Session.finish = built, cut  # type: ignore[method-assign]
    try:
        yield
    finally:
        start.place_parts, Session.finish = build, finish  # type: ignore[method-assign]


def train(case: Case, folder: Path) -> str:
    """Train the case in `folder`; returns the error that ended it, "" for none."""
    words = write_files(folder)
    case.prepare(folder)
    try:
        with spoiled(case):
            recipe = load(
                [
                    *words,
                    *(one.replace("{folder}", str(folder)) for one in case.settings),
                ]
            )
            start.start_run(recipe)
    except _Cut:
        return ""
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcome(case: Case, folder: Path) -> Outcome:
    """Run a case and read its record."""
    began, error = time.perf_counter(), ""
    if case.apart:
        command = [sys.executable, "-m", "benchmarks.sabotage", "--apart", case.name, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        _, told, found = done.stdout.rpartition("OUTCOME ")
        error = found.strip() if told else done.stderr
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            error = train(case, folder)
    messages: list[tuple[int, str]] = []
    path, last = folder / "runs" / "run", 0
    others = []
    if (path / "manifest.json").exists():
        run = RunDirectory.open(path)
        last = max((row.step for row in read_metrics(run)), default=0)
        for event in read_events(run):
            if event.kind in ("health", "warning", "spike"):
                rule = str(event.facts.get("rule", event.kind))
                others.append(rule)
                messages.append((event.step or 0, f"{rule}: {event.message} {_advice(rule)}"))
    if error:
        before = error.startswith("RefusedError")
        messages.append((last + 1 if "step" not in error and not before else last, error))
    hits = [(step, text) for step, text in messages if any(word in text for word in case.named)]
    step, text = hits[0] if hits else (0, "")
    found = next((word for word in case.named if word in text), "")
    together = " ".join(text for at, text in hits if at <= WITHIN)
    stopped = bool(error)
    return Outcome(
        case.name, bool(case.named), found, step, stopped, any(word in together for word in case.remedy), tuple(dict.fromkeys(others)),
        error[:600].replace(str(folder), "FOLDER"), time.perf_counter() - began,
    )  # fmt: skip


def _advice(rule: str) -> str:
    from lockstep.config.metric import built_in_rules

    return built_in_rules()[rule].advice if rule in built_in_rules() else ""


def chosen(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, all for none. Raises SystemExit for a name that no case has."""
    if unknown := set(names) - {case.name for case in (*BAD, *UNSEEN, *GOOD)}:
        raise SystemExit(f"no such run: {', '.join(sorted(unknown))}")
    return [case for case in (*BAD, *UNSEEN, *GOOD) if not names or case.name in names]


def table(outcomes: Sequence[Outcome]) -> str:
    """Write the page."""
    new = {case.name for case in UNSEEN}
    unseen = [one for one in outcomes if one.name in new]
    bad = [one for one in outcomes if one.bad and one.name not in new]
    good = [one for one in outcomes if not one.bad]
    caught, stopped = sum(one.right for one in bad), sum(not one.right for one in good)
    lines = [
        "# Ruined runs, and what notices them",
        "",
        "Generated by `python -m benchmarks.sabotage`: each run is real, on a CPU, with a model of 115,008 random weights.",
        "Each row is the latest reading of its run (benchmarks/results/sabotage.jsonl). Rules and cases of the first table were made together:",
        "it shows what the rules cover. Those of the second were written before their results were known, and no rule was changed for them;",
        "the last ten of the first began there, were missed or got the wrong remedy, and a rule was made for them.",
        f"A ruined run must be stopped or named within {WITHIN} steps, with the right remedy; a good one must not be stopped.",
        "",
        f"**{caught} of {len(bad)} ruined runs ({caught / max(1, len(bad)):.0%}) are stopped or named; {stopped} of {len(good)} good "
        "runs are stopped.**",
        f"**Of {len(unseen)} ruined runs that no rule was made for, {sum(one.right for one in unseen)} are.**",
        "",
        "| ruined by | named by | at step | ends the run | right remedy | others that spoke |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(one) for one in bad]
    lines += [
        "",
        "| ruined by, no rule made for it | named by | at step | ends the run | right remedy | others that spoke |",
    ]
    lines += ["|---|---|---|---|---|---|", *(_row(one) for one in unseen)]
    lines += ["", "Step 0: before the first step.", "", "| good run | stopped | warned of |", "|---|---|---|"]
    for one in good:
        others = ", ".join(other for other in one.others if other != "warning")
        lines.append(f"| {one.name} | {'**yes**' if one.stopped else 'no'} | {others or '–'} |")
    return "\n".join(lines) + "\n"


def _row(one: Outcome) -> str:
    found = one.found or "**nothing**"
    others = ", ".join(other for other in one.others if other != one.found and other not in ("warning",))
    end, remedy = ("yes" if one.stopped else "no"), ("yes" if one.remedied else "no")
    return f"| {one.name} | {found} | {one.step} | {end} | {remedy} | {others or '–'} |"


def latest() -> list[Outcome]:
    """Return the latest result of each case that has one, in the order of the cases."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    kept = {row["name"]: Outcome(**{**row, "others": tuple(row["others"])}) for row in rows}
    return [kept[case.name] for case in (*BAD, *UNSEEN, *GOOD) if case.name in kept]


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--apart"]:
        (case,) = chosen([words[1]])
        print("OUTCOME " + train(case, Path(words[2])))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(chosen(words)):
            found = outcome(case, Path(folder) / str(number))
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
            mark = "ok " if found.right else "BAD"
            print(
                f"{mark} {case.name}: {found.found or '–'} at step {found.step}, stopped {found.stopped}, remedy {found.remedied}, "
                f"also {', '.join(found.others) or '–'} ({found.seconds:.1f} s)",
                flush=True,
            )
            if not found.right:
                print(f"    {found.error}", flush=True)
    PAGE.write_text(table(latest()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
