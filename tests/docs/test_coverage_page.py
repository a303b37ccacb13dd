"""The table of needs: every row once, and each command, setting, page and test that it names exists."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from lockstep.cli import commands
from lockstep.config.help import groups

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"
ROWS = {"S0": 25, "S1": 26, "S2": 58, "S3": 102, "S4": 20, "X": 18}
STATES = ("works", "tested", "in part: ", "missing")


def table() -> list[list[str]]:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| (S\d|X)-", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_is_there_once() -> None:
    ids = [one for row in table() for one in row[0].split(", ")]
    assert len(ids) == len(set(ids)) == sum(ROWS.values()) == 249
    assert set(ids) == {f"{name}-{number}" for name, count in ROWS.items() for number in range(1, count + 1)}


def test_every_row_has_a_need_a_state_and_what_shows_it() -> None:
    for row in table():
        assert len(row) == 4, row
        assert row[1], row
        assert row[2].startswith(STATES), row
        assert "`" in row[3] or "](" in row[3], row
        if row[2] in ("works", "tested"):
            assert re.search(r"`tests/|`lockstep |`[a-z_]+(\.[a-z_]+)*`", row[3]), row


def test_what_the_table_names_exists() -> None:
    settings = {one.path for group in groups() for one in group.settings} | {group.path for group in groups()}
    parsers = argparse.ArgumentParser().add_subparsers()
    for module in commands().values():
        module.add_parser(parsers)
    actions = parsers.choices
    for row in table():
        for name in re.findall(r"`([^`]+)`", " ".join(row[2:])):
            if name.startswith("tests/"):
                path, _, test = name.partition("::")
                assert (ROOT / path).is_file(), name
                assert not test or f"def {test}(" in (ROOT / path).read_text("utf-8"), name
            elif name.startswith("lockstep "):
                words = name.split()[1:]
                assert words[0] in actions, name
                assert len(words) == 1 or words[1] in actions[words[0]].format_help(), name
            else:
                assert name in settings, name
        for link in re.findall(r"\]\(([^)]+)\)", " ".join(row)):
            assert (PAGE.parent / link).is_file(), link


@pytest.mark.parametrize("word", ["session", "helper", "/work", "verl/verl", "github.com"])
def test_the_page_says_no_more_of_the_notes(word: str) -> None:
    assert word not in PAGE.read_text("utf-8")
