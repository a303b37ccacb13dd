"""docs/health.md says of each rule what is in force."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.doctor.imports import environment_checks
from lockstep.doctor.run import doctor
from tests.docs.pages import rules_table

PAGE = (Path(__file__).parents[2] / "docs" / "health.md").read_text()


def test_each_rule_stands_there_with_its_defaults() -> None:
    settings = Recipe().health.in_force()
    assert rules_table() in PAGE, "run `make docs`"
    stopping = sum(setting.tier == "stop" for _, setting in settings)
    assert (len(settings), stopping) == (30, 12)
    assert "thirty rules watch" in PAGE
    assert "Twelve of them stop the run" in PAGE


def test_each_check_stands_there() -> None:
    firsts = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))
    named = [check.name for check in doctor(load(["smoke"]))] + [name for name, _ in environment_checks()]
    assert [name for name in named if name not in firsts] == []


def test_the_settings_shown_are_accepted(tmp_path: Path) -> None:
    text = PAGE.split("### Settings\n\n```yaml\n")[1].split("```")[0]
    (tmp_path / "r.yaml").write_text(text)
    health = load([str(tmp_path / "r.yaml")]).health
    assert (health.grad_spike.tier, health.grad_spike.limit, health.truncation.tier) == ("off", 10, "stop")
