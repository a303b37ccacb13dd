"""The NuminaMath recipe on a synthetic file of the same schema and size: are the counts those planted, how fast, how large?

    python benchmarks/data_pipeline.py                 900,000 rows: about 1.2 GB of text, some minutes
    python benchmarks/data_pipeline.py --rows 9000     a quick look

Each stage of recipes/data/numinamath.yaml gets rows that only it should drop, in the shares that were reported of the real
data, in an order shuffled by a fixed seed. Then `lockstep data check` and `lockstep data split` run on the file, each in a
process of its own, whose time and peak memory are measured. Exit 1 if a count is not the planted one, if it takes over 5
minutes, or over 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.presets import PRESETS

RECIPE = "recipes/data/numinamath.yaml"
SECONDS, GIGABYTES = 300.0, 4.0
SHARES = {
    "word_problems": 0.2958,
    "integers": 0.3850,
    "no_amc_aime": 0.0011,
    "valid": 0.0005,
    "distinct": 0.0234,
    "length": 0.0002,
    "not_aime_2024": 0.0001,
}
"""Of all rows, those that each stage is to drop: 896,215 → 631k → 286k → 285k → 285k → 264k, as reported of the real data."""
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("problem", "solution", "answer", "problem_type", "question_type")),
        *((name, pa.string()) for name in ("problem_is_valid", "solution_is_valid", "source")),
        ("synthetic", pa.bool_()),
    ]
)
WORDS = """
    let the number of points on circle with radius and center be such that every line through two them meets third find
    smallest positive integer for which sum digits equals product each person at party shakes hands exactly once how many
    ways can we arrange letters if no adjacent ones are same determine value expression when triangle has side lengths area
""".split()  # noqa: SIM905
FRACTIONS = (
    r"\frac{%d}{7}",
    "%d.5",
    "%d \\text{ cm}",
    "x=%d",
    "(%d, 3)",
    "%d, 4",
    r"%d\sqrt{2}",
    "%d\\%%",
    "\\pi+%d",
    "A",
)


@dataclass(frozen=True)
class Plan:
    """How many rows each stage drops, and how many are left."""

    dropped: dict[str, int]
    kept: int

    @property
    def rows(self) -> int:
        return sum(self.dropped.values()) + self.kept


@dataclass(frozen=True)
class Cost:
    """Of one command. `seconds` of a machine that is busy otherwise are more than `cpu_seconds`."""

    seconds: float
    cpu_seconds: float
    peak_gb: float


def plan(rows: int) -> Plan:
    dropped = {stage: max(3, round(share * rows)) for stage, share in SHARES.items()}
    return Plan(dropped, rows - sum(dropped.values()))


def problem(rng: random.Random, number: int) -> str:
    """A text that no other number gives, of some 60 words as in the real data."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(20, 100)))
    return f"{words.capitalize()}, where $n = {number}$ and $k = {rng.randint(2, 99)}$?"


def good(rng: random.Random, number: int) -> dict[str, object]:
    answer = str(rng.randint(-50, 10**6))
    return {
        "problem": problem(rng, number),
        "solution": f"We count. {' '.join(rng.choices(WORDS, k=rng.randint(40, 220)))} so the answer is \\boxed{{{answer}}}.",
        "answer": rng.choice([answer, answer, answer, f"${answer}$"]),
        "problem_type": rng.choice(["Algebra", "Geometry", "Number Theory", "Combinatorics"]),
        "question_type": "math-word-problem",
        "problem_is_valid": "Yes",
        "solution_is_valid": "Yes",
        "source": rng.choice(["cn_contest", "olympiads", "aops_forum", "orca_math"]),
        "synthetic": False,
    }


def spoiled(stage: str, rng: random.Random, number: int, aime: list[str], earlier: list[str]) -> dict[str, object]:
    """A row that passes all stages before this one, and is dropped by it."""
    row = good(rng, number)
    match stage:
        case "word_problems":
            row["question_type"] = rng.choice(["MCQ", "proof", "other"])
            row["answer"] = "proof" if row["question_type"] == "proof" else rng.choice("ABCDE")
        case "integers":
            form = rng.choice(FRACTIONS)
            row["answer"] = form % rng.randint(1, 99) if "%d" in form else form
        case "no_amc_aime":
            row["source"] = "amc_aime"
        case "valid":
            row[rng.choice(["problem_is_valid", "solution_is_valid"])] = rng.choice(["No", "Incomplete"])
        case "distinct":
            text = rng.choice(earlier)
            row["problem"] = rng.choice([text, text.upper(), text.replace(" ", "  "), f"\n{text} "])
        case "length":
            row["problem"] = rng.choice([f"{number} = ?", f"{'very ' * 500}long {number}"])
        case "not_aime_2024":
            row["problem"] = aime[number % len(aime)] if number < len(aime) else f"  {aime[number % len(aime)]}"
        case _:
            raise ValueError(stage)
    return row


def rows(planned: Plan, aime: list[str]) -> Iterator[dict[str, object]]:
    """All rows, shuffled. A repeat comes after the row that it repeats, as it must to be the one dropped."""
    rng = random.Random(0)
    kinds = [stage for stage, count in planned.dropped.items() for _ in range(count)] + ["kept"] * planned.kept
    rng.shuffle(kinds)
    first = kinds.index("kept")
    kinds[0], kinds[first] = kinds[first], kinds[0]
    earlier: list[str] = []
    copies = 0
    for number, kind in enumerate(kinds):
        if kind == "kept":
            row = good(rng, number)
            if len(earlier) < 50_000:
                earlier.append(str(row["problem"]))
        elif kind == "not_aime_2024":  # each AIME problem once, or the stage before would drop it
            row = spoiled(kind, rng, copies, aime, earlier)
            copies += 1
        else:
            row = spoiled(kind, rng, number, aime, earlier)
        yield row


def write_numina(path: Path, planned: Plan, aime: list[str]) -> None:
    with pq.ParquetWriter(path, SCHEMA) as writer:
        chunk: list[dict[str, object]] = []
        for row in rows(planned, aime):
            chunk.append(row)
            if len(chunk) == 10_000:
                writer.write_table(pa.Table.from_pylist(chunk, schema=SCHEMA))
                chunk.clear()
        if chunk:
            writer.write_table(pa.Table.from_pylist(chunk, schema=SCHEMA))


def write_aime(path: Path, problems: list[str]) -> None:
    """As on the hub: each problem 32 times, with instructions around it."""
    hub = PRESETS["aime-2024"]
    items = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": hub.before + text + hub.after, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(100 + number), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"{number}-{copy}", "raw_problem": text, "split": None},
        }
        for copy in range(32)
        for number, text in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(items), path)


def run(words: list[str]) -> tuple[str, Cost]:
    """Output of one command, and what it cost."""
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-m", "lockstep", *words], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read()
    if status:
        raise SystemExit(f"lockstep {' '.join(words)} ended with status {status}:\n{text}")
    return text, Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)


def counts(output: str) -> dict[str, int]:
    """Rows that each stage dropped, by the table in the output."""
    table = re.findall(r"^ +(\w+) +\w+ +(\d+) +(\d+) +(\d+)$", output, re.MULTILINE)
    return {name: int(dropped) for name, _, dropped, _ in table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=900_000)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder, removed at the end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return measure(args.folder or Path(scratch), plan(args.rows))


def measure(folder: Path, planned: Plan) -> int:
    rng = random.Random(1)
    count = max(30, planned.dropped["not_aime_2024"])
    aime = [problem(rng, -1 - number) for number in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    data, sanity, out = folder / "numinamath.parquet", folder / "aime-2024.parquet", folder / "split"
    write_numina(data, planned, aime)
    write_aime(sanity, aime)
    own = [
        *(RECIPE, f"task.data.source={data}", "task.data.preset=numinamath-1.5"),
        *(f"task.data.filters.6.sources=[{sanity}]", "task.data.filters.6.preset=aime-2024"),
        f"task.heldout.sanity={{source: {sanity}, preset: aime-2024}}",
    ]
    checked, check = run(["data", "check", *own])
    sizes = {"test": 500, "validation": 5000, "train": 50_000}
    parts = {name: min(size, planned.kept // 4) for name, size in sizes.items()}
    words = ",".join(f"{name}={size}" for name, size in parts.items())
    _, split = run(["data", "split", *own, "--out", str(out), "--parts", words])
    found = counts(checked)
    kept = int(re.search(r"bad, (\d+) kept", checked)[1])
    wrong = [stage for stage, dropped in planned.dropped.items() if found.get(stage) != dropped]
    print(f"{planned.rows:,} rows, {data.stat().st_size / 2**20:.0f} MB of parquet, {os.cpu_count()} cores\n")
    print(f"{'stage':<16}{'planted':>10}{'dropped':>10}")
    for stage, dropped in planned.dropped.items():
        print(f"{stage:<16}{dropped:>10,}{found.get(stage, -1):>10,}{'' if stage not in wrong else '   WRONG'}")
    print(f"{'left':<16}{planned.kept:>10,}{kept:>10,}\n")
    print(f"{'command':<16}{'seconds':>10}{'CPU s':>10}{'peak GB':>10}")
    for name, cost in (("data check", check), ("data split", split)):
        print(f"{name:<16}{cost.seconds:>10.1f}{cost.cpu_seconds:>10.1f}{cost.peak_gb:>10.2f}")
    manifest = json.loads((out / "manifest.json").read_text())
    written = ", ".join(f"{output['part']} {output['rows']:,}" for output in manifest["outputs"])
    print(f"\nparts: {written}; questions in two of them: {sum(pair['normalised'] for pair in manifest['overlap'])}")
    slow = any(cost.seconds > SECONDS or cost.peak_gb > GIGABYTES for cost in (check, split))
    return 1 if wrong or kept != planned.kept or slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
