"""docs/health.md says of each rule what is in force."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.doctor.run import doctor
from lockstep.health.rules import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "health.md").read_text()


def test_each_rule_stands_there_with_its_defaults() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"`{rule.name}`" for rule in RULES]
    settings = Recipe().health.rules
    for row, rule in zip(rows, RULES, strict=True):
        setting = settings[rule.name]
        patience = f"{setting.steps} of {setting.within}" if setting.within else f"{setting.steps} in a row"
        assert row[1] == f"`{rule.metric}` {rule.side}"
        assert row[2].startswith(f"{setting.limit:g}")
        assert row[3:] == [patience, setting.tier, rule.source]
    stopping = sum(setting.tier == "stop" for setting in settings.values())
    assert (len(rows), stopping) == (17, 6)
    assert "seventeen rules watch" in PAGE
    assert "Six of them stop the run" in PAGE


def test_each_check_stands_there() -> None:
    firsts = " ".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))
    for check in doctor(load(["smoke"])):
        assert check.name in firsts, check


def test_the_settings_shown_are_accepted(tmp_path: Path) -> None:
    text = PAGE.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "r.yaml").write_text(text)
    health = load([str(tmp_path / "r.yaml")]).health
    assert (health.grad_spike.tier, health.grad_spike.limit, health.truncation.tier) == ("off", 10, "stop")
