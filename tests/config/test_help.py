from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import Field

from lockstep.config.algorithm import Algorithm, Parts
from lockstep.config.help import Setting, common_section, groups, help_lines, schema_json, settings_markdown, variants
from lockstep.config.load import dump, load, parse
from lockstep.config.schema import Recipe
from lockstep.config.section import Section, meanings


def setting(path: str) -> Setting:
    """The first of that path: a setting of two variants stands with each."""
    return next(s for group in groups() for s in group.settings if s.path == path)


def test_a_setting_has_type_default_range_and_meaning() -> None:
    assert setting("rollout.max_tokens") == Setting(
        "rollout.max_tokens", "integer", "64", ">= 1", "Longest response, in tokens."
    )
    assert setting("rollout.slots").type == "choice or integer"
    assert setting("rollout.slots").allowed == "auto, >= 1, <= 4096"
    assert setting("optimizer.lr").type == "number or null"
    assert setting("optimizer.betas").type == "list of 2 numbers"
    assert setting("optimizer.betas").allowed == "each >= 0, < 1"
    assert setting("adapter.kind").allowed == "none, lora, peft"
    assert setting("algorithm.kl.estimator").allowed == "k1, k2, k3"
    assert setting("allow").type == "list of choice"
    assert setting("allow").allowed.startswith("each slow_warmup, long_warmup, ")
    assert setting("task.heldout").allowed == "keys id_probe, ood_probe, sanity"
    assert setting("eval.modes.N.name").default == '"greedy"'
    assert setting("chat.examples.N.user").default == "required"
    assert setting("algorithm.critic").type == "section or null"
    assert setting("algorithm.kind").help.startswith("A name for one choice of the settings below")
    assert setting("algorithm.loss.kind").help.endswith("Also path.py:function, for a loss of your own.")


def test_every_setting_has_a_meaning() -> None:
    assert [s.path for group in groups() for s in group.settings if not s.help] == []


def _leaves(value: Any, path: str) -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else key)]
    return [path]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["adapter.kind=lora", "task={kind: file, data: x, verifier: {kind: text}}"],
        ["task={kind: python, path: 'x.py:y'}"],
        ["algorithm.kind=ppo", "algorithm.correction.kind=mis"],
        ["algorithm.kind=cispo", "algorithm.advantage.kind=whitened", "algorithm.correction.kind=tis"],
    ],
)
def test_every_setting_of_a_recipe_is_listed(args: list[str]) -> None:
    known = {s.path for group in groups() for s in group.settings}
    assert set(_leaves(parse(dump(load(args)), "").value, "")) <= known


def test_what_all_kinds_of_algorithm_share_is_listed_once() -> None:
    titles = [group.title for group in groups() if group.title.startswith("algorithm")]
    assert titles[:3] == ["algorithm", "algorithm.advantage (kind: group)", "algorithm.advantage (kind: leave_one_out)"]
    assert len(titles) == len(set(titles))
    assert not any(title.startswith("algorithm (kind") for title in titles)
    paths = [s.path for group in groups() for s in group.settings if s.path.startswith("algorithm.kl")]
    assert paths == [f"algorithm.kl.{name}" for name in ("coef", "estimator", "placement", "target", "horizon")]


def test_each_kind_of_algorithm_has_a_line_with_the_defaults_of_its_own() -> None:
    (shared,) = (group for group in groups() if group.kinds and group.path == "algorithm")
    own = {kind.name: kind.defaults for kind in shared.kinds}
    assert tuple(own) == tuple(
        get_args(get_args(Algorithm)[0])[n].model_fields["kind"].default for n in range(len(own))
    )
    assert own["grpo"] == ()
    assert own["dr_grpo"] == ("advantage.divide_by_std=false", "aggregation=seq-mean-token-sum-norm")
    assert own["dapo"] == ("loss.clip_high=0.28", "aggregation=token-mean", "dynamic_sampling.enabled=true")
    assert own["ppo"] == ("advantage.kind=gae", "aggregation=token-mean", "critic={}")
    assert own["reinforce_pp_baseline"] == (
        "advantage.kind=whitened",
        "advantage.baseline=group_mean",
        "aggregation=token-mean",
    )


@pytest.mark.parametrize("kind", get_args(get_args(Algorithm)[0]))
def test_the_listed_defaults_make_the_kind_out_of_grpo(kind: type[Section]) -> None:
    """Written as overrides of plain GRPO, they give the same objective: nothing is left out, nothing is invented."""
    (shared,) = (group for group in groups() if group.kinds and group.path == "algorithm")
    (own,) = (entry.defaults for entry in shared.kinds if entry.name == kind.model_fields["kind"].default)
    built = load([f"algorithm.{default}" for default in own]).algorithm.model_dump(exclude={"kind"})
    assert built == kind().model_dump(exclude={"kind"})


def test_sections_whose_variants_share_nothing_are_listed_one_by_one() -> None:
    assert common_section(variants(Recipe.model_fields["task"].annotation)) is None
    assert common_section(variants(Recipe.model_fields["algorithm"].annotation)) is Parts
    assert {group.title for group in groups() if group.path == "adapter"} == {
        "adapter (kind: none)",
        "adapter (kind: lora)",
        "adapter (kind: peft)",
    }


def test_help_is_one_line_a_setting_and_a_prefix_narrows_it() -> None:
    everything = help_lines()
    listed = [line.split()[0] for line in everything if line.startswith("  ") and not line.startswith("    ")]
    assert listed == [s.path for group in groups() for s in group.settings]
    kinds = [line.split()[0] for line in everything if line.startswith("    ")]
    assert kinds == [f"{group.path}.kind={kind.name}" for group in groups() for kind in group.kinds]
    own = [kind for kind in kinds if kind.startswith("algorithm.")]
    assert [line.split()[0] for line in help_lines("algorithm.kind") if line.startswith("    ")] == own
    (heading, *kl) = help_lines("algorithm.kl.")
    assert heading.startswith("algorithm.kl: Penalty")
    assert [line.split()[:3] for line in kl] == [
        ["algorithm.kl.coef", "number", "0.0"],
        ["algorithm.kl.estimator", "choice", '"k3"'],
        ["algorithm.kl.placement", "choice", '"loss"'],
        ["algorithm.kl.target", "number", "or"],
        ["algorithm.kl.horizon", "integer", "10000"],
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
    assert len(rows) == sum(len(group.settings) + len(group.kinds) for group in groups())
    columns = [len(row.replace("\\|", "").split("|")) for row in rows]
    assert columns.count(7) == sum(len(group.settings) for group in groups())
    assert columns.count(5) == sum(len(group.kinds) for group in groups())


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


def test_a_section_whose_source_cannot_be_read_has_no_texts_but_works() -> None:
    """The class of a notebook's cell, or of a module that nobody registered."""
    made: dict[str, type[Section]] = {}
    exec(
        "class Mine(Section):\n    size: int = 3\n    '''Never found.'''\n    width: int = Field(2, description='Said.')\n",
        {"Section": Section, "Field": Field, "__name__": "nowhere"},
        made,
    )
    assert made["Mine"](size=4).model_dump() == {"size": 4, "width": 2}
    assert meanings(made["Mine"]) == {"width": "Said."}
    assert made["Mine"].model_json_schema()["properties"]["width"]["description"] == "Said."
