"""Any valid recipe survives dump and load; any text gives a recipe or a ConfigError of single lines, and nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.config.help import groups
from lockstep.config.load import dump, load, load_mapping
from lockstep.config.schema import Recipe
from lockstep.config.text import parse, to_yaml
from lockstep.errors import ConfigError

settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("lockstep")

RECIPE = """\
name: a
steps: 10
adapter: {kind: lora, rank: 4}
task:
  kind: file
  data: "x.jsonl"
optimizer: {lr: 3e-6, betas: [0.9, 0.99]}
eval:
  modes:
    - {name: greedy}
chat:
  system: |
    Think.
    Then answer.
"""

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-12, max_value=1e12)
share = st.floats(min_value=0.001, max_value=0.999)
count = st.integers(1, 10_000)
text = st.text(max_size=20)
TRICKY = (
    *("no", "1e-6", "3", "~", "", "null", "0o7", "1_000", "2020-01-01", "1:30", ".5", "<<", "=", "- a", "a: b", "#"),
    *(
        "*a",
        "&a",
        "!a",
        "'",
        '"',
        "\\",
        " a ",
        "|",
        "\x85",
        "\u2028",
        "\ufeff",
        "\t",
        "\n\n a",
        "a\n",
        "a \n b",
        "a\r\nb",
    ),
)
tricky = st.sampled_from(TRICKY)
words = text | tricky
data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
free = st.dictionaries(words, data, max_size=3)
python_path = st.sampled_from(["mine.py:Mine", "a/b c.py:f"])


def section(
    required: dict[str, st.SearchStrategy[Any]] | None = None, **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required or {}, optional=optional)


verifiers = (
    section({"kind": st.just("numeric")}, tolerance=positive, fallback=st.sampled_from(["none", "last_number"]))
    | section({"kind": st.just("text")}, fallback=st.sampled_from(["none", "last_line"]))
    | section({"kind": st.just("python"), "path": python_path})
)
sources = st.sampled_from(["a.jsonl", "org/name", "hf://datasets/a/b/c.parquet", "no", "1e-6"])
data_sections = section({"source": sources}, id=st.none() | words, prompt=words, max_rows=count)
tasks = (
    section(settings=free, size=count, verifier=verifiers)
    | section(
        {"kind": st.just("file"), "data": data_sections},
        heldout=st.dictionaries(st.sampled_from(["id_probe", "sanity"]), data_sections, max_size=2),
        verifier=verifiers,
    )
    | section({"kind": st.just("python"), "path": python_path}, settings=free)
)

above_one = st.floats(min_value=1, max_value=1e6)
levels = st.sampled_from(["token", "sequence"])
losses = (
    section(
        {"kind": st.just("clip")},
        clip_low=share,
        clip_high=positive,
        dual_clip=st.none() | above_one.filter(lambda c: c > 1),
    )
    | section({"kind": st.just("gspo")}, clip_low=share)
    | section({"kind": st.just("cispo")}, weight_floor=share, weight_cap=above_one)
    | section({"kind": st.just("python"), "path": python_path}, settings=free)
    | python_path
)
corrections = section({"kind": st.just("tis")}, level=levels, cap=above_one) | section(
    {"kind": st.just("mis")}, level=levels, low=share, high=above_one, weigh=st.booleans()
)
algorithms = section(  # of the default kind: the settings that other kinds have other defaults for
    advantage=section(divide_by_std=st.booleans(), std_eps=positive, std_ddof=st.integers(0, 1))
    | section({"kind": st.just("leave_one_out")}),
    loss=losses,
    aggregation=st.sampled_from(["token-mean", "prompt-mean"]),
    kl=section({"coef": positive}, target=st.none() | positive, estimator=st.sampled_from(["k2", "k3"])),
    correction=corrections,
    overlong=section(buffer=st.integers(0, 64), penalty=positive, drop_truncated=st.booleans()),
    dynamic_sampling=section(enabled=st.booleans()),
) | section(
    {
        "kind": st.sampled_from(
            ["dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo", "max_rl", "reinforce"]
        )
    },
    entropy_coef=positive,
    old_logprobs=st.sampled_from(["auto", "recompute", "rollout"]),
    dynamic_sampling=section(max_rounds=count),
)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Valid recipes as plain data."""
    prompts, samples = draw(st.integers(1, 6)), draw(st.integers(2, 6))
    divisors = [n for n in range(1, prompts * samples + 1) if prompts * samples % n == 0]
    names = draw(st.lists(st.from_regex(r"[a-z0-9_.@-]+", fullmatch=True), min_size=1, max_size=3, unique=True))
    lora = section({"kind": st.just("lora")}, alpha=positive, targets=st.just("all-linear") | st.lists(words))
    examples = st.lists(section({"user": words, "assistant": words}), max_size=2)
    sinks = st.lists(st.sampled_from(["wandb", "trackio"]))
    rest = section(
        model=words.filter(bool) | section(path=words.filter(bool), revision=st.none() | words),
        adapter=lora | st.just({}),
        task=tasks,
        chat=section(system=st.none() | words, suffix=words, template_kwargs=free, examples=examples),
        rollout=section(
            temperature=st.floats(1e-3, 1e6),
            top_p=share,
            stop=st.lists(words.filter(bool), max_size=3),
            ignore_eos=st.booleans(),
        ),
        algorithm=algorithms,
        optimizer=section(lr=st.none() | positive, betas=st.tuples(share, share), eps=positive),
        track=section(tags=st.lists(words, max_size=2), sinks=sinks),
        threads=st.none() | st.integers(1, 1024),
        seed=st.integers(0, 2**31 - 1),
    )
    return {
        "steps": draw(count),
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "update": {"samples_per_update": draw(st.sampled_from(divisors)), "epochs": draw(st.integers(1, 3))},
        "eval": {"modes": [{"name": name, "temperature": draw(st.sampled_from([0.0, 0.5]))} for name in names]},
    } | draw(rest)


@given(trees())
def test_dump_loads_to_the_equal_recipe(tree: dict[str, Any]) -> None:
    recipe = load_mapping(tree)
    assert load_mapping(parse(dump(recipe), "").value) == recipe  # type: ignore[arg-type]
    assert dump(load_text(dump(recipe))) == dump(recipe)


@given(trees())
def test_dump_means_the_same_to_a_yaml_1_1_reader(tree: dict[str, Any]) -> None:
    recipe = load_mapping(tree)
    assert load_mapping(yaml.safe_load(dump(recipe))) == recipe


@given(free)
def test_plain_data_survives_yaml(value: dict[str, Any]) -> None:
    assert parse(to_yaml(value), "").value == value


@given(st.text(max_size=200) | tricky | st.binary(max_size=200))
def test_any_text_is_a_recipe_or_one_error(content: str | bytes) -> None:
    check(content)


@given(st.integers(0, len(RECIPE)), st.integers(0, 12), words | st.text("{}[]:,-#&*!|>'\"%@` \n\t~?0ae.", max_size=6))
def test_a_damaged_recipe_is_a_recipe_or_one_error(start: int, length: int, inserted: str) -> None:
    check(RECIPE[:start] + inserted + RECIPE[start + length :])


known = sorted({part for group in groups() for setting in group.settings for part in setting.path.split(".")})
names = st.sampled_from(known) | words
junk = st.recursive(
    data | st.sampled_from([float("nan"), float("inf"), 2**5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(names, junk, min_size=1, max_size=5))
def test_any_mapping_is_a_recipe_or_one_error(tree: dict[str, Any]) -> None:
    try:
        assert isinstance(load_mapping(tree), Recipe)
    except ConfigError as error:
        well_formed(error)


@given(
    st.lists(
        st.builds("{}={}".format, st.lists(names, min_size=1, max_size=4).map(".".join), words) | words, max_size=4
    )
)
def test_any_arguments_are_a_recipe_or_one_error(args: Sequence[str]) -> None:
    try:
        assert isinstance(load(args), Recipe)
    except ConfigError as error:
        well_formed(error)


def check(content: str | bytes) -> None:
    try:
        assert isinstance(load_text(content), Recipe)
    except ConfigError as error:
        well_formed(error)


def load_text(content: str | bytes) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load([str(path)])


def well_formed(error: ConfigError) -> None:
    assert error.mistakes
    assert all(line.isprintable() and line for line in error.mistakes), error.mistakes
