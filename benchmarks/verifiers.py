"""How fast the verifiers are, what hostile answers cost, and where `math` differs from math-verify.

    python benchmarks/verifiers.py [--write]

Prints what benchmarks/results/verifiers.txt holds. --write stores it there, and the list of differences in docs/verifiers.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import math_verify  # noqa: E402
import psutil  # noqa: E402

from lockstep.config import schema  # noqa: E402
from lockstep.types import Prompt  # noqa: E402
from lockstep.verifiers.base import Verifier  # noqa: E402
from lockstep.verifiers.exact import Numeric  # noqa: E402
from lockstep.verifiers.expression import Expression  # noqa: E402
from tests.verifiers.hostile import cases  # noqa: E402
from tests.verifiers.pairs import Pair, pairs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "verifiers.txt"
DOC = ROOT / "docs" / "verifiers.md"
MARKS = ("<!-- differences: written by benchmarks/verifiers.py --write -->\n", "<!-- end of differences -->")
INTEGERS = 2000


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair on which the two graders do not agree."""

    pair: Pair
    ours: bool

    @property
    def why(self) -> str:
        match self.pair.family, self.ours:
            case "integers", True:
                return "a trailing point ends a sentence; math-verify reads no answer that equals the reference"
            case "percents", False:
                return "50% is one half; math-verify takes 50 for 50%"
            case "wordings", False if "=" in self.pair.answer:
                return "two numbers set equal are two answers; math-verify takes the last"
            case _:
                return "not explained"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the results and the list")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found, compared = differences()
    lines = [
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        "",
    ]
    lines += [*integer_lines(), "", *hostile_lines(), "", *agreement_lines(found, compared)]
    print("\n".join(lines))
    if args.write:
        RESULTS.write_text("\n".join(lines) + "\n")
        before, _, rest = DOC.read_text().partition(MARKS[0])
        DOC.write_text(before + MARKS[0] + difference_table(found) + MARKS[1] + rest.partition(MARKS[1])[2])


# --- speed ------------------------------------------------------------------------------------------------------------
def integer_lines() -> list[str]:
    """Microseconds a reply, for different integers so that nobody's memory helps; best of three passes over fresh ones."""
    draw = random.Random(1)
    rows = []
    expression = Expression(schema.MathVerifier())
    graders: dict[str, Callable[[Prompt, str], bool]] = {
        "numeric": _ours(Numeric("none", 1e-6)),
        "math": _ours(expression),
        "math-verify": _theirs,
    }
    times: dict[str, float] = {}
    for name, grader in graders.items():
        passes = []
        for _ in range(3):
            asked = [
                (Prompt("p", (), str(n)), f"So it is \\boxed{{{n + n % 2}}}.")
                for n in draw.sample(range(10**9), INTEGERS)
            ]
            start = time.process_time()
            verdicts = [grader(prompt, reply) for prompt, reply in asked]
            passes.append((time.process_time() - start) / INTEGERS)
            assert verdicts == [int(prompt.answer) % 2 == 0 for prompt, _ in asked]
        times[name] = min(passes)
        rows.append(f"  {name:12} {times[name] * 1e6:8.1f} us a reply")
    ratios = ", ".join(f"{name} {times['math-verify'] / times[name]:.0f} times" for name in ("numeric", "math"))
    return [
        f"integer answers, {INTEGERS} different ones, processor time:",
        *rows,
        f"  faster than math-verify: {ratios}",
    ]


def hostile_lines() -> list[str]:
    """What each hostile answer costs the verifier `math`, nothing remembered: median of three."""
    verifier, prompt = Expression(schema.MathVerifier(workers=1)), Prompt("p", (), "42")
    verifier.pool.start()
    found, processor, wrong, stages = [], [], 0, Counter[str]()
    for case in cases():
        seconds = []
        used = _used(verifier)
        for _ in range(3):
            verifier.forget()
            start = time.perf_counter()
            grade = verifier.grade(prompt, case.reply)
            seconds.append(time.perf_counter() - start)
        wrong += grade.reward != float(case.right if case.expression is None else case.expression)
        stages[_stage(grade.metrics)] += 1
        found.append(statistics.median(seconds))
        now = _used(verifier)  # of another process if that one was ended, at its limit
        processor.append((now - used) / 3 if now >= used else schema.MathVerifier().cpu_seconds)
    found.sort()
    over = sum(value > 0.05 for value in found)
    verifier.pool.close()
    return [
        f"hostile answers, {len(found)} of them, wall time of one, median of 3:",
        f"  wrong verdicts {wrong}",
        f"  median {found[len(found) // 2] * 1e3:.2f} ms, 99 % below {found[len(found) * 99 // 100] * 1e3:.0f} ms, "
        f"slowest {found[-1] * 1e3:.0f} ms, above 50 ms {over}",
        f"  processor time, here and in the process: slowest {max(processor) * 1e3:.0f} ms",
        "  decided by: " + ", ".join(f"{name} {count}" for name, count in stages.most_common()),
    ]


def _used(verifier: Expression) -> float:
    """Seconds of processor time of this process and of those that work for it."""
    times = [psutil.Process(pid).cpu_times() for pid in verifier.pool.pids]
    return time.process_time() + sum(t.user + t.system for t in times)


def _stage(metrics: object) -> str:
    assert isinstance(metrics, dict)
    match metrics["symbolic"], metrics["too_hard"]:
        case 0, 0:
            return "the first stage"
        case 0, 1:
            return "the screen"
        case 1, 0:
            return "math-verify"
        case _:
            return "the worker's limits"


def _ours(verifier: Verifier) -> Callable[[Prompt, str], bool]:
    return lambda prompt, reply: verifier.grade(prompt, reply).reward == 1.0


def _theirs(prompt: Prompt, reply: str) -> bool:
    return bool(math_verify.verify(math_verify.parse(f"${prompt.answer}$"), math_verify.parse(reply)))


# --- agreement --------------------------------------------------------------------------------------------------------
def differences() -> tuple[list[Difference], Counter[str]]:
    """Pairs on which `math` and math-verify (its defaults) differ, and how many of each family were compared."""
    verifier, found, compared = Expression(schema.MathVerifier()), [], Counter[str]()
    for pair, theirs in answered(pairs()):
        ours = verifier.grade(Prompt("p", (), pair.reference), f"\\boxed{{{pair.answer}}}").reward == 1.0
        compared[pair.family] += 1
        if ours != theirs:
            found.append(Difference(pair, ours))
    verifier.pool.close()
    return found, compared


def answered(asked: Sequence[Pair]) -> Iterator[tuple[Pair, bool]]:
    """The pairs of which math-verify reads both sides, with its verdict."""
    for pair in asked:
        reference = math_verify.parse(f"${pair.reference}$")
        answer = math_verify.parse(f"\\boxed{{{pair.answer}}}")
        if reference and answer:
            yield pair, bool(math_verify.verify(reference, answer))


def agreement_lines(found: Sequence[Difference], compared: Counter[str]) -> list[str]:
    total = sum(compared.values())
    families = ", ".join(f"{name} {count}" for name, count in compared.items())
    reasons = Counter(difference.why for difference in found)
    return [
        f"agreement with math-verify {math_verify_version()} on {total} pairs ({families}):",
        f"  {total - len(found)} the same, {len(found)} different",
        *(f"  {count}: {why}" for why, count in reasons.most_common()),
    ]


def math_verify_version() -> str:
    from importlib.metadata import version

    return version("math-verify")


def difference_table(found: Sequence[Difference]) -> str:
    words = {True: "right", False: "wrong"}
    rows = [
        f"| `{d.pair.reference}` | `{d.pair.answer}` | {words[d.ours]} | {words[not d.ours]} | {d.why} |" for d in found
    ]
    return "\n".join(["| reference | answer | here | math-verify | why |", "|---|---|---|---|---|", *rows, ""]) + "\n"


if __name__ == "__main__":
    main()
