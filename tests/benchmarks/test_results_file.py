"""A benchmark writes its own section of a committed table, with what made it, and leaves the others alone."""

from __future__ import annotations

import re
from pathlib import Path

from results_file import RESULTS, command, header, sections, write_section


def test_a_section_is_added_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "results" / "step.txt"
    write_section(file, "full", ["python step.py", "", "| a |", ""])
    write_section(file, "lora", ["| b |"])
    assert file.read_text() == "## full\n\npython step.py\n\n| a |\n\n## lora\n\n| b |\n"
    write_section(file, "full", ["| c |"])
    assert file.read_text() == "## full\n\n| c |\n\n## lora\n\n| b |\n"


def test_what_stands_before_the_first_section_stays(tmp_path: Path) -> None:
    file = tmp_path / "step.txt"
    file.write_text("by hand\n")
    write_section(file, "full", ["| a |"])
    assert file.read_text() == "by hand\n\n## full\n\n| a |\n"


def test_a_section_says_what_made_it_and_where() -> None:
    assert (
        command("/x/benchmarks/gpu_step.py", ["--arms", "TRL stock"])
        == "python benchmarks/gpu_step.py --arms 'TRL stock'"
    )
    first, second = header("gpu_step.py", "NVIDIA H200", ("pytest", "no-such-package"), ["--write"])
    assert first == "python benchmarks/gpu_step.py --write"
    assert re.fullmatch(
        r"NVIDIA H200, \w+ with \d+ CPU cores, Python 3\.\d+\.\d+; pytest [\d.]+; 20\d\d-\d\d-\d\d", second
    )


def test_the_committed_tables_are_made_of_sections() -> None:
    for name in ("gpu_step", "gpu_rollout", "gpu_memory", "gpu_numerics"):
        found = sections((RESULTS / f"{name}.txt").read_text())
        assert found, name
        assert "" not in found, f"{name}.txt has text before its first section, which no run would replace"
        assert all("NVIDIA H200" in body or "7B shape" in body for body in found.values()), name
