from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.commands.config import facts
from lockstep.config.help import groups
from lockstep.config.load import dump, load
from lockstep.config.search import WORDS
from tests.saying import Printed


def test_show_prints_the_resolved_recipe(printed: Printed, tmp_path: Path) -> None:
    shown = printed("config", "show", "smoke", "steps=7")
    assert shown == dump(load(["smoke", "steps=7"]))
    file = tmp_path / "shown.yaml"
    file.write_text(shown)
    assert load([str(file)]).steps == 7


def test_check_prints_what_a_recipe_amounts_to(printed: Printed) -> None:
    overrides = [
        "steps=30",
        "prompts_per_step=4",
        "samples_per_prompt=8",
        "update.samples_per_update=16",
        "update.epochs=2",
    ]
    out = printed("config", "check", "smoke", *overrides, "optimizer.warmup_steps=5", "eval.at_start=false")
    assert out.startswith("ok: smoke\n")
    assert "32 a step = 4 prompts x 8 samples" in out
    assert "at most 768 a step = 32 x 24" in out
    assert "120 = 30 steps x 4 of 16 samples each" in out
    assert "2e-05 (default of rl with adapter lora), constant, after 5 warm-up steps" in out
    assert "greedy (T=0 x 1), at steps 20, 30" in out


def test_facts_are_those_in_force() -> None:
    known = dict(
        facts(load(["optimizer.lr=1e-5", "steps=100", "eval.every=10", "eval.at_start=true", "save.every=50"]))
    )
    assert known["learning rate"].startswith("1e-05 (set)")
    assert known["evaluation"].endswith("at steps 0, 10, 20, 30, …, 100")
    assert known["checkpoints"].startswith("at steps 50, 100;")
    assert dict(facts(load(["eval.enabled=false"])))["evaluation"] == "never (eval.enabled: false)"
    assert dict(facts(load(["adapter.kind=none"])))["learning rate"].startswith("1e-06 (default")


def test_check_prints_every_mistake_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "smoke", "stepz=7", "optimizer.lr=-1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "lockstep: 2 mistakes in smoke stepz=7 optimizer.lr=-1:\n"
        "  optimizer.lr=-1: must be at least 0\n"
        "  stepz=7: no such setting; did you mean steps?\n"
    )


def test_help_lists_settings_by_prefix(printed: Printed) -> None:
    out = printed("config", "help", "rollout.top_")
    assert [line.split()[0] for line in out.splitlines()] == ["rollout:", "rollout.top_k", "rollout.top_p"]
    assert "did you mean rollout" in printed("config", "help", "rolout", code=2)
    assert "eval.modes.N.temperature" in printed("config", "help")


def test_schema_is_json(printed: Printed) -> None:
    assert json.loads(printed("config", "schema"))["title"] == "Recipe"


def test_every_built_in_recipe_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml")):
        assert main(["config", "check", str(path)]) == 0, path
        assert capsys.readouterr().out.startswith("ok: ")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["reward"], "task.verifier.kind"),
        (["rewards"], "task.verifier.kind"),
        (["learning", "rate"], "optimizer.lr"),
        (["lr"], "optimizer.lr"),
        (["kl"], "algorithm.kl.coef"),
        (["batch", "size"], "prompts_per_step"),
        (["ppo_epochs"], "update.epochs"),
        (["num_generations"], "samples_per_prompt"),
        (["temperature"], "rollout.temperature"),
    ],
)
def test_help_finds_settings_by_the_words_of_the_field(words: list[str], first: str, printed: Printed) -> None:
    head, line, *_ = printed("config", "help", *words).splitlines()
    assert head.startswith(f"no setting starts with {' '.join(words)!r}; these are nearest")
    assert line.split()[0] == first


def test_every_synonym_leads_to_a_setting() -> None:
    known = {setting.path for group in groups() for setting in group.settings}
    assert {path for paths in WORDS.values() for path in paths} - known == set()


def test_names_that_are_alike_are_suggested_once_each(printed: Printed) -> None:
    assert printed("config", "help", "optimizr", code=2).count("optimizer ") <= 1


def test_check_refuses_a_run_without_a_task_and_says_what_it_did_not_read(printed: Printed) -> None:
    assert "task: required" in printed("config", "check", "steps=3", code=2)
    assert "lockstep doctor RECIPE" in printed("config", "check", "task=reasoning_gym")
