"""CPU and wall seconds of each test, children included, as JSON lines: `pytest -p tests.durations --cpu-times FILE`.

CPU time says the same on a busy machine as on an idle one; wall time does not, but it shows the tests that wait. A child counts
when it has been waited for: what a long-lived worker process did is told with the test that ended it.

`python -m tests.durations FILE [FILE2]` prints the files of tests by CPU seconds, as the table of tests/DURATIONS.md.
`python -m tests.durations --slow FILE` prints the list of tests there that `make test` leaves out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

OUT = pytest.StashKey[Path]()
LONG = 2.0
"""CPU seconds from which a test is left to `make test-all`."""


def cpu() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="append each test's CPU seconds to FILE, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-times"):
        config.stash[OUT] = Path(config.getoption("--cpu-times")).resolve()


def _write(config: pytest.Config, row: dict[str, object]) -> None:
    if OUT in config.stash:
        with config.stash[OUT].open("a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(session.config, {"test": "collection", "cpu": round(cpu(), 2), "slow": False})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, start = cpu(), time.perf_counter()
    result = yield
    slow = item.get_closest_marker("slow") is not None
    wall = round(time.perf_counter() - start, 3)
    _write(item.config, {"test": item.nodeid, "cpu": round(cpu() - before, 3), "wall": wall, "slow": slow})
    return result


def table(path: Path, *, fast: bool = False) -> Counter[str]:
    """CPU seconds by test file; only of the tests that are not marked slow, if `fast`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if not (fast and row["slow"]):
            seconds[row["test"].split("::")[0]] += row["cpu"]
    return Counter(seconds)


def slow(path: Path) -> list[str]:
    """Tests of LONG CPU seconds or more; of files that find known mistakes (mutations.toml) only the longest."""
    text = (Path(__file__).parent / "mutations.toml").read_text()
    finders = {f"tests/{name}" for name in re.findall(r'"([a-z_0-9/]+\.py)', text)}
    found: dict[str, float] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        name = row["test"].partition("[")[0]
        if "::" in name and not row["slow"]:
            found[name] = max(found.get(name, 0.0), row["cpu"])
    return sorted(
        name for name, cpu in found.items() if cpu >= (4 * LONG if name.partition("::")[0] in finders else LONG)
    )


def main(paths: list[str]) -> None:
    if paths[0] == "--slow":
        print("\n".join(f"- {name}" for name in slow(Path(paths[1]))))
        return
    tables = [table(Path(path)) for path in paths]
    print("| file | " + " | ".join(Path(path).stem for path in paths) + " |")
    print("|---|" + "---:|" * len(paths))
    rows = [("all", [sum(each.values()) for each in tables])]
    rows += [(name, [each[name] for each in tables]) for name, _ in tables[0].most_common(60)]
    for name, seconds in rows:
        print(f"| {name} | " + " | ".join(f"{one:.1f}" for one in seconds) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
