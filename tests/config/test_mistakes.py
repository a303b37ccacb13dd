from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, model_validator

from lockstep.config.help import groups
from lockstep.config.load import dump, load, load_mapping
from lockstep.config.mistakes import ELSEWHERE, OURS
from lockstep.config.schema import NumericVerifier, PythonVerifier, Recipe
from lockstep.errors import ConfigError


def mistakes(*args: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(args)
    return caught.value.mistakes


def test_all_mistakes_at_once_with_file_line_path_value_reason_and_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("""\
steps: many
optimizer:
  lrr: 3e-6
  eps: 0
rollout: {lr: 1}
adapter:
  kind: lorra
sync:
  transport: share
steps: 3
health: {warn_unscored: 0.5}
""")
    assert mistakes(str(file), "eval.items=0", "samples_per_prompt=1") == [
        f"{file}:10: steps: written twice, first in line 1",
        f'{file}:1: steps="many": must be a whole number',
        f'{file}:7: adapter.kind="lorra": must be none or lora or peft; did you mean lora?',
        f"{file}:5: rollout.lr=1: no such setting; did you mean optimizer.lr or algorithm.critic.lr?",
        f"{file}:4: optimizer.eps=0: must be above 0",
        f"{file}:3: optimizer.lrr=3e-06: no such setting; did you mean optimizer.lr?",
        f'{file}:9: sync.transport="share": must be shared or copy; did you mean shared?',
        "eval.items=0: must be at least 1",
        "samples_per_prompt=1: grpo compares the samples of a prompt and needs at least 2",
        f"{file}:11: health.warn_unscored is above health.max_unscored: the warning could never come first",
    ]


@pytest.mark.parametrize(
    ("arg", "hint"),
    [
        ("stepz=3", "did you mean steps?"),
        ("device=gpu", "did you mean cuda?"),
        ("device=GPU", "did you mean cuda?"),
        ("optimiser.lr=1", "did you mean optimizer?"),
        ("rollout.max_token=3", "did you mean rollout.max_tokens?"),
        ("Rollout.slots=3", "did you mean rollout?"),
        ("lr=3", "did you mean optimizer.lr or algorithm.critic.lr?"),
        ("kl.coef=3", "did you mean algorithm.kl?"),
        ("model.lr=3", "did you mean optimizer.lr or algorithm.critic.lr?"),
        ("learning_rate=3", "did you mean optimizer.lr?"),
        ("rollout.max_new_tokens=3", "did you mean rollout.max_tokens?"),
        ("group_size=4", "did you mean samples_per_prompt?"),
        ("eval.modes.0.nmae=x", "did you mean eval.modes.0.name?"),
        ("algorithm.kl.ceof=1", "did you mean algorithm.kl.coef?"),
        ("sync.zzz=1", "known here: transport, probe_first, probe_every, probe_sequences, probe_tokens"),
        ("adapter.rank=4", "with kind: none; it belongs to adapter (kind: lora)"),
        ("task.heldout_rows=4", "with kind: reasoning_gym; it belongs to task (kind: file)"),
    ],
)
def test_nearest_names(arg: str, hint: str) -> None:
    (line,) = mistakes(arg)
    assert hint in line


def test_names_of_other_systems_lead_to_settings_that_exist() -> None:
    known = {setting.path for group in groups() for setting in group.settings}
    assert OURS.keys() <= known
    assert not ELSEWHERE.keys() & known
    assert all(name in OURS[ours] for name, meant in ELSEWHERE.items() for ours in meant)
    for name, meant in ELSEWHERE.items():
        (line,) = mistakes(f"{name}=1")
        assert f"did you mean {' or '.join(meant)}" in line


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (
            "actor_rollout_ref.actor.clip_ratio_low",
            "actor_rollout_ref.actor.clip_ratio_low of verl is algorithm.loss.clip_low here",
        ),
        ("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.n of verl is samples_per_prompt here"),
        ("rollout.n", "rollout.n of verl is samples_per_prompt here"),
        ("actor.num_nodes", "actor.num_nodes of OpenRLHF has no counterpart: one machine"),
        ("algorithm.clip_ratio_low", "algorithm.loss.clip_low"),
        ("epsilon_high", "algorithm.loss.clip_high"),
        ("loss_agg_mode", "algorithm.aggregation"),
        ("loss_type", "algorithm.loss.kind or algorithm.aggregation"),
        ("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.divide_by_std"),
        ("scale_rewards", "algorithm.advantage.divide_by_std"),
        ("num_iterations", "update.epochs"),
        ("update.ppo_epochs", "update.epochs"),
        ("ppo_mini_batch_size", "update.samples_per_update"),
        ("beta", "algorithm.kl.coef"),
        ("init_kl_coef", "algorithm.kl.coef"),
        ("algorithm.kl.kl_loss_type", "algorithm.kl.estimator"),
        ("algorithm.adv_estimator", "algorithm.kind"),
        ("rollout_is", "algorithm.correction.kind"),
        ("vllm_importance_sampling_clip_max", "algorithm.correction.cap or algorithm.correction.high"),
        ("lam", "algorithm.advantage.lam"),
        ("gamma", "algorithm.advantage.gamma"),
        ("cliprange_value", "algorithm.critic.value_clip"),
        ("algorithm.filter_groups", "algorithm.dynamic_sampling.enabled"),
        ("overlong_buffer", "algorithm.overlong.buffer"),
        ("algorithm.std_eps", "algorithm.advantage.std_eps"),
    ],
)
def test_names_of_algorithm_settings_elsewhere_lead_here(name: str, ours: str) -> None:
    (line,) = mistakes(f"{name}=1")
    assert ours in line
    assert "no such setting" in line


def test_a_section_of_another_system_names_its_settings_here(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("data: {train_batch_size: 8, seed: 1, prompt_key: q, max_response_length: 64, zzz: 1}\n")
    (line,) = mistakes(str(file))
    assert "data.train_batch_size of verl is prompts_per_step here (prompts); data.seed of verl is seed here; " in line
    assert line.endswith("; and 1 more: `lockstep config translate` takes the whole file")


def test_a_python_file_without_its_function_is_told_the_form() -> None:
    assert mistakes("task.verifier=own.py", "algorithm.loss=my/own.py") == [
        'task.verifier="own.py": must name the function or class in that file: own.py:grade',
        'algorithm.loss="my/own.py": must name the function or class in that file: my/own.py:NAME',
    ]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["algorithm.correction={kind: mis, low: -0.5}"], "algorithm.correction.low=-0.5: must be at least 0"),
        (["algorithm.correction={kind: mis, low: 3, high: 2}"], "low=3 is above high=2: nothing would be kept"),
        (
            ["algorithm.correction={kind: mis, low: 1.5}"],
            "the band [1.5, 5] leaves out w = 1, the weight of equal policies",
        ),
        (
            ["algorithm.correction={kind: mis, level: geometric}"],
            "[0.5, 5] is too wide for a geometric mean, which stays within a few percent of 1",
        ),
        (
            ["algorithm.overlong.buffer=4096", "rollout.max_tokens=1024"],
            "algorithm.overlong.buffer=4096 is above rollout.max_tokens=1024: even an empty reply would be punished",
        ),
        (
            ["samples_per_prompt=1"],
            "samples_per_prompt=1: grpo compares the samples of a prompt and needs at least 2",
        ),
        (["algorithm.kind=rloo", "samples_per_prompt=1"], "samples_per_prompt=1: rloo compares"),
        (["algorithm.kind=dapo", "samples_per_prompt=1"], "samples_per_prompt=1: dapo compares"),
        (["algorithm.kind=reinforce_pp_baseline", "samples_per_prompt=1"], "reinforce_pp_baseline compares"),
        (["algorithm.kind=ppo", "algorithm.critic=null"], "advantage.kind=gae needs a critic: set algorithm.critic"),
        (["algorithm.critic={}"], "the critic would not be used: advantage.kind is group, only gae reads values"),
        (
            ["algorithm.kl={coef: 0.1, estimator: k1}"],
            "the KL estimator k1 gives no gradient on average when used in the loss",
        ),
        (["algorithm.kl.target=0.1"], "a target needs a coef above 0 to start from"),
        (["algorithm.kl={coef: 0.1, placement: reward}"], "kl.placement=reward needs per-token rewards"),
        (["algorithm.old_logprobs=rollout", "algorithm.correction.kind=tis"], "a correction would apply it twice"),
        (["algorithm.loss.dual_clip=1"], "algorithm.loss.dual_clip=1: must be above 1"),
        (["algorithm.loss={kind: cispo, weight_cap: 0.5}"], "algorithm.loss.weight_cap=0.5: must be at least 1"),
    ],
)
def test_objectives_that_make_no_sense_are_refused_with_the_reason(args: list[str], reason: str) -> None:
    (line,) = mistakes(*args)
    assert reason in line
    assert "algorithm" in line or "samples_per_prompt" in line


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            ["loop=sft", "sft={data: {source: rows.jsonl}}", "prompts_per_step=7"],
            "prompts_per_step applies to loop=rl only",
        ),
        (
            ["loop=sft", "sft={data: rows.jsonl}", "samples_per_prompt=7"],
            "samples_per_prompt applies to loop=rl only",
        ),
        (
            ["loop=sft", "sft={data: {source: rows.jsonl}}", "update.epochs=7"],
            "update.epochs applies to loop=rl only",
        ),
        (
            ["adapter={kind: lora, merged: true, dora: true}"],
            "merged cannot be combined with dora; leave one of the two out",
        ),
        (["adapter={kind: lora, merged: true, base: nf4}"], "merged cannot be combined with base=nf4"),
        (["adapter={kind: lora, merged: true}", "numerics.train=nvfp4-w4a16"], "has one weight for base and adapter"),
        (["adapter={kind: lora, base: nf4}", "numerics.train=nvfp4-w4a4"], "nvfp4-w4a4 quantises linear layers, which"),
        (["adapter={kind: lora, base: nf4}", "numerics.eval=mxfp4-w4a16"], "has packed in 4 bits already"),
        (['rollout.stop=[""]'], "rollout.stop.0"),
    ],
)
def test_settings_without_a_meaning_together_are_refused(args: list[str], reason: str) -> None:
    (line,) = mistakes(*args)
    assert reason in line


@pytest.mark.parametrize("kind", ["reinforce", "reinforce_pp", "ppo"])
def test_algorithms_that_compare_no_samples_take_one(kind: str) -> None:
    assert load([f"algorithm.kind={kind}", "samples_per_prompt=1"]).samples_per_prompt == 1


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("task={{kind: agent, command: {}}}", "task.command"),
        ("task={{kind: openenv, command: {}}}", "task.command"),
        ("task={{kind: tools, tools: [{{mcp: {}}}]}}", "task.tools.0.mcp"),
    ],
)
def test_a_command_is_one_that_a_shell_could_read(task: str, setting: str) -> None:
    for command, why in (('"a \'b"', "as a shell reads it: No closing quotation"), ('" "', "empty: name a program")):
        (line,) = mistakes(task.format(command))
        assert line.startswith(f"{setting}: the command ")
        assert line.endswith(why)


def test_paths_have_no_variant_tags_even_if_a_key_is_called_like_one() -> None:
    lines = mistakes("adapter={kind: lora, lora: {rank: 3}, rank: -1, targets: [a, 3]}")
    assert [line.partition("=")[0] for line in lines] == ["adapter.targets.1", "adapter.rank", "adapter.lora"]


def test_alternatives_of_a_value_are_one_mistake() -> None:
    assert mistakes("adapter={kind: lora, targets: 5}") == [
        "adapter.targets=5: must be auto or all-linear or attention or must be a list"
    ]


def test_a_kind_that_does_not_exist_names_those_that_do() -> None:
    assert mistakes("adapter=lorra") == ['adapter="lorra": must be none or lora or peft; did you mean lora?']
    assert mistakes("algorithm=gpro")[0].endswith("; did you mean gspo or grpo?")


def test_a_path_without_a_name_is_told_its_form() -> None:
    (line,) = mistakes("task={kind: python, path: own.py}")
    assert line == 'task.path="own.py": must be file.py:NAME, with the name of the function or class in that file'


def test_required_settings_are_named() -> None:
    assert mistakes("task.kind=file") == ["task.data: required"]
    assert mistakes("chat.examples=[{user: a}]") == ["chat.examples.0.assistant: required"]


def test_every_broken_rule_is_reported_not_only_the_first() -> None:
    lines = mistakes(
        "samples_per_prompt=1", "update.samples_per_update=3", "optimizer.warmup_steps=200", "health.warn_unscored=1"
    )
    assert [line.partition("=")[0].partition(" ")[0] for line in lines] == [
        "update.samples_per_update",
        "samples_per_prompt",
        "optimizer.warmup_steps",
        "health.warn_unscored",
    ]


def test_rules_that_read_a_broken_setting_are_not_judged() -> None:
    assert mistakes("steps=x", "optimizer.warmup_steps=60") == ['steps="x": must be a whole number']
    assert len(mistakes("steps=x", "samples_per_prompt=1")) == 2


def test_values_that_are_no_data_are_refused_by_path() -> None:
    tree = {"task": {"settings": {"a": [1, float("nan")]}}, "chat": {"system": "\ud800"}, "seed": {3}, "steps": 0}
    with pytest.raises(ConfigError) as caught:
        load_mapping(tree)
    lines = caught.value.mistakes
    assert [line.partition("=")[0] for line in lines] == ["task.settings.a.1", "chat.system", "seed", "steps"]
    assert lines[0] == "task.settings.a.1=.nan: must be a finite number"


def test_a_flood_of_mistakes_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        load_mapping({f"k{n}": n for n in range(5000)})
    assert len(caught.value.mistakes) == 101
    assert caught.value.mistakes[-1] == "and 4900 more"


class Extended(Recipe):
    """A recipe with what the schema does not have yet: a required union, another kind of bound, a rule with a bug."""

    other: NumericVerifier | PythonVerifier = Field(discriminator="kind")
    """Required."""
    even: int = Field(default=2, multiple_of=2)
    """An even number."""

    @model_validator(mode="after")
    def _has_a_bug(self) -> Extended:
        if self.steps == 13:
            raise AttributeError("a bug")
        return self


def test_kinds_of_mistakes_that_the_schema_does_not_have_yet() -> None:
    with pytest.raises(ConfigError) as caught:
        load_mapping({"other": {}, "even": 3}, Extended)
    assert caught.value.mistakes == ["other.kind: required", "even=3: input should be a multiple of 2"]
    with pytest.raises(ConfigError) as caught:
        load_mapping({"steps": 13, "even": 3, "other": {"kind": "numeric"}, "seed": -1}, Extended)
    assert [line.partition("=")[0] for line in caught.value.mistakes] == ["seed", "even"]


def test_a_bug_in_a_rule_is_no_mistake_of_the_user() -> None:
    with pytest.raises(AttributeError, match="a bug"):
        load_mapping({"steps": 13, "other": {"kind": "numeric"}}, Extended)


def test_a_whole_number_too_large_for_a_float() -> None:
    assert mistakes(f"optimizer.lr={2**1024 - 1}")[0].endswith(": must be a finite number")
    assert mistakes(f"optimizer.lr={2**1025}")[0].endswith(": must be a finite number")
    assert mistakes(f"optimizer.lr={'9' * 5000}")[0].endswith(": must be a finite number")


def test_a_filter_of_a_list_is_named_with_its_number() -> None:
    start = "task={kind: file, data: {source: a, filters: [{kind: distinct}, "
    assert mistakes(start + "{kind: amog}]}}")[0].startswith('task.data.filters.1.kind="amog": must be among or ')
    assert mistakes(start + "{kind: amog}]}}")[0].endswith("did you mean among or not_among?")
    assert mistakes(start + "{knd: among}]}}") == [
        'task.data.filters.1.knd="among": no such setting; did you mean task.data.filters.1.kind?'
    ]
    assert mistakes(start + "{kind: among, colums: [a], values: [1]}]}}") == [
        "task.data.filters.1.columns: required",
        'task.data.filters.1.colums=["a"]: no such setting; did you mean task.data.filters.1.columns?',
    ]


def test_a_source_of_the_wrong_form_names_the_right_one() -> None:
    (line,) = mistakes("task={kind: file, data: 'https://huggingface.co/datasets/openai/gsm8k'}")
    assert line == "task.data: a web page; write the hub id openai/gsm8k"


def test_a_run_takes_one_gpu_unless_its_placement_asks_for_more():
    assert mistakes("device=cuda:1") == ['device="cuda:1": must be auto or cpu or cuda; did you mean cuda?']
    assert mistakes("gpus=2") == ["gpus=2: no such setting; did you mean placement.gpus?"]


def test_what_workers_cannot_run_is_refused():
    place = "placement={kind: colocated, gpus: 2}"
    for setting, others in (("rollout.engine=vllm", "split or local"), ("sync.transport=copy", "local")):
        (line,) = mistakes(place, setting)
        assert f"{setting} does not run with placement.kind=colocated; take {others}" in line
    split = "placement={kind: split, train: 1, rollout: 1}"
    load([split, "rollout.engine=vllm"])
    assert len(mistakes(split, "rollout.engine=vllm", "sync.transport=copy")) == 1
    assert mistakes("placement.gpus=0", "placement.kind=colocated") != []


@pytest.mark.parametrize(
    "address",
    [
        "https://judge.example/v1?key=HUSH", "https://judge.example/v1?v=2&api-key=HUSH", "http://me:HUSH@judge/v1",
        "https://a/b?X-Amz-Signature=HUSH", "https://a/b?sig=HUSH&x=1", "https://a/#access_token=HUSH",
        "https://a/b?accessKey=HUSH",
    ],
)  # fmt: skip
@pytest.mark.parametrize("setting", ["task.verifier.url", "task.data.source"])
def test_a_secret_in_an_address_is_refused_and_not_repeated(setting: str, address: str) -> None:
    judge = ["task={kind: file, data: a.jsonl, verifier: {kind: judge, url: 'http://judge/v1', model: m}}"]
    with pytest.raises(ConfigError, match=r"task\.(verifier\.url|data)") as caught:
        load([*judge, f"{setting}={address}"])
    assert "HUSH" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["https://judge.example/v1?api-version=2&keyword=a&design=b", "http://localhost:8000/v1?key="]
)
def test_an_address_without_a_secret_is_taken(address: str) -> None:
    recipe = load([f"task={{kind: file, data: a.jsonl, verifier: {{kind: judge, url: '{address}', model: m}}}}"])
    assert address in dump(recipe)


def test_a_text_that_speaks_of_keys_is_no_address() -> None:
    load(["chat.system=Call https://host/v1?key=YOURS to look it up."])
