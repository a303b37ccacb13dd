from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.help import Setting, groups, help_lines, schema_json, settings_markdown
from lockstep.config.load import dump, load, parse
from lockstep.config.schema import Recipe, Section


def setting(path: str) -> Setting:
    (found,) = (s for group in groups() for s in group.settings if s.path == path)
    return found


def test_a_setting_has_type_default_range_and_meaning() -> None:
    assert setting("rollout.slots") == Setting(
        "rollout.slots", "integer", "64", ">= 1, <= 4096", "Sequences decoded side by side; more wait for a free slot."
    )
    assert setting("optimizer.lr").type == "number or null"
    assert setting("optimizer.betas").type == "list of 2 numbers"
    assert setting("optimizer.betas").allowed == "each >= 0, < 1"
    assert setting("adapter.kind").allowed == "none, lora"
    assert setting("algorithm.kl.estimator").allowed == "k1, k2, k3"
    assert setting("track.sinks").type == "list of choice"
    assert setting("track.sinks").allowed == "each wandb, trackio, tensorboard"
    assert setting("task.heldout").allowed == "keys id_probe, ood_probe, sanity"
    assert setting("eval.modes.N.name").default == '"greedy"'
    assert setting("chat.examples.N.user").default == "required"


def test_every_setting_has_a_meaning() -> None:
    nameless = [s.path for group in groups() for s in group.settings if not s.help and s.path != "algorithm.kind"]
    assert nameless == []


def _leaves(value: Any, path: str) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    return [path]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["adapter.kind=lora", "task={kind: file, path: x, verifier: {kind: text}}"],
        ["task={kind: python, path: 'x.py:y'}"],
    ],
)
def test_every_setting_of_a_recipe_is_listed(args: list[str]) -> None:
    known = {s.path for group in groups() for s in group.settings}
    assert set(_leaves(parse(dump(load(args)), "").value, "")) <= known


def test_help_is_one_line_a_setting_and_a_prefix_narrows_it() -> None:
    everything = help_lines()
    listed = [line.split()[0] for line in everything if line.startswith("  ")]
    assert listed == [s.path for group in groups() for s in group.settings]
    (heading, *kl) = help_lines("algorithm.kl.")
    assert heading.startswith("algorithm.kl: Penalty")
    assert [line.split()[:3] for line in kl] == [
        ["algorithm.kl.coef", "number", "0.0"],
        ["algorithm.kl.estimator", "choice", '"k3"'],
    ]
    assert help_lines("nothing") == []


def test_the_schema_knows_variants_ranges_and_the_short_form_of_model() -> None:
    schema = json.loads(schema_json())
    assert schema["properties"]["model"]["anyOf"][0] == {"type": "string"}
    assert schema["$defs"]["Lora"]["properties"]["rank"]["maximum"] == 1024
    assert schema["$defs"]["Lora"]["additionalProperties"] is False
    assert schema["properties"]["adapter"]["discriminator"]["propertyName"] == "kind"


def test_the_settings_page_is_the_generated_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_markdown(), (
        "run: python -m lockstep.config.help > docs/settings.md"
    )


def test_the_settings_page_has_a_row_for_each_setting() -> None:
    rows = [line for line in settings_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(group.settings) for group in groups())
    assert all(len(row.replace("\\|", "").split("|")) == 7 for row in rows)


def test_a_new_setting_shows_up_by_itself() -> None:
    class Mine(Section):
        """My own section."""

        depth: int = 3
        """How deep."""

    class Extended(Recipe):
        """A recipe with one more section."""

        mine: Mine = Mine()

    assert any(
        s == Setting("mine.depth", "integer", "3", "", "How deep.") for g in groups(Extended) for s in g.settings
    )
    assert "## mine\n\nMy own section.\n" in settings_markdown(Extended)
