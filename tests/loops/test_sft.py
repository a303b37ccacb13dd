"""SFT: what carries loss, packing, aggregation, what becomes of rows, resume, replies of another run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep.build.build import build_parts, build_task_of
from lockstep.build.parts import Parts
from lockstep.config.load import load
from lockstep.config.schema import Recipe, Rollouts
from lockstep.errors import ConfigError, DataError, Interrupted
from lockstep.loops.sft import sft_batch, train, validation_metrics, validation_steps
from lockstep.loops.sft_data import SftRows, preview, read_material, read_replies, tokenised
from lockstep.loops.start import resume_run, start_run
from lockstep.track.rollouts import read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.track.writer import read_metrics
from lockstep.types import Batch, TrainSequence
from tests.loops import runs, sft_runs

NO_EVAL = ("eval.enabled=false", "steps=2")


def built(recipe: Recipe) -> tuple[Parts, SftRows]:
    assert recipe.sft is not None
    parts = build_parts(recipe, build_task_of(recipe))
    return parts, tokenised(read_material(recipe), parts.policy.chat, recipe.sft, parts.policy.context)


def whole(one: TrainSequence) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Ids and mask of a row."""
    return one.prompt_ids + one.ids, (False,) * len(one.prompt_ids) + one.trained


def by_transformers(model: Any, sequences: tuple[TrainSequence, ...]) -> list[torch.Tensor]:
    """-log p of the trained tokens of each row, one row at a time, by transformers' own attention and logits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    found = []
    for one in sequences:
        ids, on = whole(one)
        logits = plain(torch.tensor([ids])).logits[0, :-1].double()
        losses = -logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append(losses[torch.tensor(on[1:])].detach())
    return found


# --- a whole run ----------------------------------------------------------------------------------------------------
def test_a_run_learns_its_rows_and_is_scored(tmp_path: Path, tiny_model_dir: Path):
    run = sft_runs.trained(tmp_path, tiny_model_dir, "steps=30", "eval.every=15", "sft.validate_every=10")
    rows = {row.step: row for row in read_metrics(run)}
    assert sorted(rows) == list(range(31))
    assert rows[30].metrics["sft/loss"] < 0.3 * rows[1].metrics["sft/loss"]
    assert rows[30].metrics["validation/loss"] < 0.5 * rows[0].metrics["validation/loss"]
    assert [step for step in rows if "validation/loss" in rows[step].metrics] == [0, 10, 20, 30]
    assert [step for step in rows if "eval/greedy/accuracy" in rows[step].metrics] == [0, 15, 30]
    assert rows[30].metrics["sft/epoch"] == 30 * 4 / 24
    assert not any(name.startswith(("entropy/", "mismatch/", "reward/")) for name in rows[30].metrics)
    assert rows[3].proof is None, "weights go to the engine only where they are scored or saved"
    assert rows[10].proof is not None
    facts = run.manifest()["sft"]
    assert (facts["train"], facts["validation"], facts["dropped"], facts["truncated"]) == (24, 4, 0, 0)
    page = run.report_path.read_text()
    assert "Loss of given replies" in page
    assert "supervised, token_mean" in page
    log = run.log_path.read_text()
    assert "⟦the answer is \\boxed{" in log
    assert "24 rows are trained on, 4 validate; an epoch is 6 steps of 4 rows, the run 5 epochs" in log


def test_a_run_has_as_many_epochs_as_were_asked_for(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Of 24 rows an epoch takes 4 times 5: 12 steps are 3 epochs, as sft.epochs counts them, and not 2.5."""
    asked = sft_runs.recipe(tmp_path, tiny_model_dir, "sft.sequences_per_step=5", "steps=12")
    assert read_material(asked).notes[-1].endswith("an epoch is 4 steps of 5 rows, the run 3 epochs")
    run = sft_runs.trained(tmp_path, tiny_model_dir, *NO_EVAL, "sft.sequences_per_step=5", "steps=2")
    assert [row.metrics["sft/epoch"] for row in read_metrics(run) if row.step] == [0.25, 0.5]


OPTIMIZER = '''
import os
import signal
from pathlib import Path

import torch
import yaml

TRIGGER = Path(__file__).parent / "sigterm"


class Mine(torch.optim.Optimizer):
    """Momentum; where the file is there, its fifth step sends SIGTERM to the process, once."""

    def __init__(self, params, lr, decay: float = 0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["sum"] = p.grad.clone() if "sum" not in state else state["sum"] * group["decay"] + p.grad
                p -= group["lr"] * state["sum"]
        if state["count"] == 5 and TRIGGER.exists():
            TRIGGER.unlink()
            os.kill(os.getpid(), signal.SIGTERM)
'''


def test_an_interrupted_run_continues_bit_by_bit(tmp_path: Path, tiny_model_dir: Path):
    """With an optimizer of one's own: its state comes back too, and its settings are checked like any other's."""
    (tmp_path / "own.py").write_text(OPTIMIZER)
    own = f"optimizer={{kind: python, path: {tmp_path}/own.py:Mine, lr: 0.05, schedule: wsd, settings: {{decay: 0.8}}}}"
    args = ("steps=8", "eval.every=4", own)
    unbroken = sft_runs.trained(tmp_path, tiny_model_dir, *args, "name=unbroken")
    (tmp_path / "sigterm").touch()
    with pytest.raises(Interrupted, match="SIGTERM after step 5 of 8"):
        sft_runs.trained(tmp_path, tiny_model_dir, *args, "name=broken")
    broken = resume_run(tmp_path / "runs" / "broken")
    assert runs.weights(broken, 8)["model.safetensors"] == runs.weights(unbroken, 8)["model.safetensors"]
    assert runs.weights(broken, 8) == runs.weights(unbroken, 8)
    ours, theirs = runs.numbers(broken), runs.numbers(unbroken)
    assert theirs[8]["sft/loss"] != theirs[7]["sft/loss"]
    ignored = ("sync/tensors", "weights/changed_tensors")  # step 5 was saved, in the other run it was not
    for step in theirs:
        for name, value in theirs[step].items():
            assert name in ignored or ours[step][name] == value, (step, name)


# --- what carries loss ----------------------------------------------------------------------------------------------
CHAT = [
    {"role": "user", "content": "What is 1 plus 1?"},
    {"role": "assistant", "content": "the number 2"},
    {"role": "user", "content": "times 3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.mark.parametrize(("train_on", "spans"), [("last", ["6"]), ("all_assistant", ["the number 2", "6"])])
def test_the_chosen_turns_carry_loss(tmp_path: Path, tiny_model_dir: Path, train_on: str, spans: list[str]):
    recipe = sft_runs.recipe(
        tmp_path,
        tiny_model_dir,
        *NO_EVAL,
        f"sft={{data: {{source: {tmp_path}/chats.jsonl, messages: messages}}, train_on: {train_on}, validation_rows: 0, "
        "sequences_per_step: 2}",
    )
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT}) + "\n")
    parts, rows = built(recipe)
    ids, on = whole(rows.train[0])
    chat = parts.policy.chat
    shown = preview(rows, chat)
    assert [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]] == [f"{text}<|im_end|>" for text in spans]
    assert on[-1], "what the template writes after the last end token is not read"
    assert chat.render(CHAT[:3]) == ids[: len(chat.render(CHAT[:3]))]


def test_the_loss_is_that_of_each_row_alone(tmp_path: Path, tiny_model_dir: Path):
    """Packed, with shared prefixes and prompts, in any micro-batches: to 1e-5 what transformers says of one row at a time."""
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, "sft.sequences_per_step=12")
    parts, rows = built(recipe)
    batch = sft_batch(parts, recipe, rows, 0)
    alone = by_transformers(tiny_model_dir, batch.sequences)
    expected = float(torch.cat(alone).mean())
    variants = {
        "packed": (),
        "one by one": ("update.tokens_per_microbatch=1",),
        "unshared": ("update.share_prompts=false",),
    }
    weights = {}
    for name, overrides in variants.items():
        fresh, _ = built(sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, *overrides))
        metrics = fresh.learner.update(batch, fresh.objective.loss)
        assert metrics["sft/loss"] == pytest.approx(expected, abs=1e-5), name
        assert metrics["loss/policy"] == pytest.approx(expected, abs=1e-5), name
        assert metrics["batch/microbatches"] == (12 if name == "one by one" else 1)
        weights[name] = metrics["grad/norm"]
    assert weights["one by one"] == pytest.approx(weights["packed"], rel=1e-5)
    assert weights["unshared"] == pytest.approx(weights["packed"], rel=1e-5)
    assert rows.prefix > 0, "the system text is processed once"


def test_no_row_sees_its_neighbours(tmp_path: Path, tiny_model_dir: Path):
    """Another neighbour changes nothing of a row's loss."""
    parts, rows = built(sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL))
    one, other, third = rows.train[:3]
    with_other = parts.learner.response_logprobs([one, other], 1.0)[0]
    with_third = parts.learner.response_logprobs([one, third], 1.0)[0]
    assert with_other == pytest.approx(with_third, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_aggregation_by_hand(tmp_path: Path, tiny_model_dir: Path, aggregation: str):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, f"sft.aggregation={aggregation}")
    parts, rows = built(recipe)
    batch = sft_batch(parts, recipe, rows, 0)
    alone = by_transformers(tiny_model_dir, batch.sequences)
    assert len({len(losses) for losses in alone}) > 1, "rows of one length would show no difference"
    means = [float(losses.mean()) for losses in alone]
    expected = float(torch.cat(alone).mean()) if aggregation == "token_mean" else sum(means) / len(means)
    assert parts.learner.update(batch, parts.objective.loss)["loss/policy"] == pytest.approx(expected, abs=1e-5)


def test_the_validation_loss_is_a_mean_over_tokens_and_trains_nothing(tmp_path: Path, tiny_model_dir: Path):
    parts, rows = built(sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL))
    before = [p.clone() for p in parts.policy.model.parameters()]
    found = validation_metrics(parts, rows)
    expected = float(torch.cat(by_transformers(tiny_model_dir, rows.validation)).mean())
    assert found["validation/loss"] == pytest.approx(expected, abs=1e-5)
    assert found["validation/logprob"] == -found["validation/loss"]
    assert all(torch.equal(a, b) for a, b in zip(before, parts.policy.model.parameters(), strict=True))
    trained = {whole(one)[0] for one in rows.train}
    assert not trained & {whole(one)[0] for one in rows.validation}


def test_batches_are_a_function_of_the_step(tmp_path: Path, tiny_model_dir: Path):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL)
    parts, rows = built(recipe)
    epoch = [whole(one)[0] for step in range(6) for one in sft_batch(parts, recipe, rows, step).sequences]
    assert sorted(epoch) == sorted(whole(one)[0] for one in rows.train), "every row once an epoch"
    again = [whole(one)[0] for one in sft_batch(parts, recipe, rows, 3).sequences]
    assert again == epoch[12:16]
    second = [whole(one)[0] for step in range(6, 12) for one in sft_batch(parts, recipe, rows, step).sequences]
    assert second != epoch
    assert isinstance(sft_batch(parts, recipe, rows, 0), Batch)


# --- rows that do not fit -------------------------------------------------------------------------------------------
def long_rows(folder: Path) -> None:
    rows = [{"prompt": f"What is {a}?", "answer": "so " * (60 if a == 3 else 2)} for a in range(9)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft_of(folder: Path, too_long: str, tokens: int = 60) -> str:
    return (
        f"sft={{data: {{source: {folder}/long.jsonl}}, validation_rows: 0, sequences_per_step: 4, max_tokens: {tokens}, "
        f"too_long: {too_long}}}"
    )


@pytest.mark.parametrize(("too_long", "left"), [("drop", 8), ("truncate", 9)])
def test_rows_that_are_too_long_are_counted(tmp_path: Path, tiny_model_dir: Path, too_long: str, left: int):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, sft_of(tmp_path, too_long))
    long_rows(tmp_path)
    _, rows = built(recipe)
    assert len(rows.train) == left
    assert (rows.dropped, rows.truncated) == ((1, 0) if too_long == "drop" else (0, 1))
    assert max(len(whole(one)[0]) for one in rows.train) <= 60
    assert any("1 rows dropped" in note or "1 truncated" in note for note in rows.notes)


def test_a_run_says_how_often_it_sees_what_is_left(tmp_path: Path, tiny_model_dir: Path):
    long_rows(tmp_path)
    run = sft_runs.trained(tmp_path, tiny_model_dir, *NO_EVAL, sft_of(tmp_path, "drop"))
    assert "1 rows are left out, so the 2 steps are 1 passes over the rest" in (run.path / "log.txt").read_text()


def test_a_row_that_is_too_long_stops_unless_said_otherwise(tmp_path: Path, tiny_model_dir: Path):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, sft_of(tmp_path, "stop"))
    long_rows(tmp_path)
    with pytest.raises(DataError, match=r"1 rows cannot be trained on: .*/4: \d+ tokens, more than sft.max_tokens=60"):
        built(recipe)


def test_a_truncated_row_without_a_trained_token_is_dropped(tmp_path: Path, tiny_model_dir: Path):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, sft_of(tmp_path, "truncate", tokens=5))
    long_rows(tmp_path)
    with pytest.raises(DataError, match="one step needs 4 rows, but 0 are left; 9 were too long"):
        built(recipe)


def test_a_validation_set_of_which_nothing_is_left_is_refused(tmp_path: Path, tiny_model_dir: Path):
    long_rows(tmp_path)
    only = {"prompt": "What is 3?", "answer": "so " * 60}
    (tmp_path / "held.jsonl").write_text(json.dumps(only) + "\n")
    sft = sft_of(tmp_path, "drop").replace("validation_rows: 0", f"validation: {tmp_path}/held.jsonl")
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, sft)
    with pytest.raises(DataError, match=r"none of the 1 validation rows fits into sft\.max_tokens=60"):
        built(recipe)


def test_a_row_that_asks_a_held_out_question_is_refused(tmp_path: Path, tiny_model_dir: Path):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, f"sft.data.source={tmp_path}/sums.jsonl")
    with pytest.raises(DataError, match="4 training rows ask a held-out question of the task"):
        start_run(recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"validation_rows": 0})}))


def test_too_few_rows_are_said_so(tmp_path: Path, tiny_model_dir: Path):
    for override, match in (("sft.sequences_per_step=99", "24 rows to train on, but one step needs 99"),
                            ("sft.validation_rows=28", "28 questions are needed for validation, but there are")):  # fmt: skip
        with pytest.raises(DataError, match=match):
            built(sft_runs.recipe(tmp_path, tiny_model_dir, override))
    same = f"sft.validation={tmp_path}/rows.jsonl"
    with pytest.raises(
        DataError, match=r"0 rows to train on, .* 4; 28 more repeat a question of the validation"
    ) as caught:
        built(sft_runs.recipe(tmp_path, tiny_model_dir, same))
    assert caught.value.fix == "lower sft.sequences_per_step or give other rows as sft.validation"


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["loop=sft"], "needs section sft"),
        (["sft={data: rows.jsonl}"], "section sft has no effect with loop=rl"),
        (["loop=sft", "sft={validation_rows: 3}"], "neither data nor rollouts is set"),
        (["loop=sft", "sft={data: rows.jsonl, rollouts: {run: runs/a}}"], "data and rollouts are both set"),
        (["loop=sft", "sft={data: rows.jsonl}", "update.epochs=2"], "update.epochs applies to loop=rl only"),
        (["loop=sft", "sft={data: rows.jsonl}", "algorithm.kl.coef=0.1"], "algorithm applies to loop=rl only"),
    ],
)
def test_mistakes_of_the_recipe(overrides: list[str], match: str):
    with pytest.raises(ConfigError, match=match):
        load(overrides)


def test_validation_steps(tmp_path: Path, tiny_model_dir: Path):
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, "steps=10", "eval.every=4")
    assert validation_steps(recipe) == (0, 4, 8, 10)
    assert train.__module__ == "lockstep.loops.sft"


# --- replies of another run -----------------------------------------------------------------------------------------
RARELY = "task.verifier.path={folder}/grader.py:rarely"


def rl_run(folder: Path, model: Path) -> Path:
    run = runs.trained(
        folder, model, RARELY.format(folder=folder), "rollout={max_tokens: 24, stop: [e, i]}", runs.NO_EVAL, "name=rl"
    )
    return run.path


def test_replies_of_a_run_keep_their_ids(tmp_path: Path, tiny_model_dir: Path):
    run = RunDirectory.open(rl_run(tmp_path, tiny_model_dir))
    sampled = [row for step in rollout_steps(run) for row in read_rollouts(run, step)]
    fit = {row.prompt_ids + row.ids for row in sampled if row.finish == "stop"}
    assert fit, "some replies must have ended"
    section = f"sft={{data: null, rollouts: {{run: {run.path}, keep: all}}, validation_rows: 0, sequences_per_step: 1}}"
    recipe = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, section)
    parts, rows = built(recipe)
    assert {whole(one)[0] for one in rows.train} <= fit
    assert any(
        f"{len(rows.train)} replies have the ids that were sampled, 0 were tokenised again" in n for n in rows.notes
    )
    assert all(all(one.trained) for one in rows.train)
    other = sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, section, "chat.system=so")
    parts, rows = built(other)
    assert "0 replies have the ids that were sampled" in rows.notes[-1]
    assert "another chat template" in rows.notes[-1]
    for one in rows.train:
        assert parts.policy.chat.decode(one.prompt_ids).startswith("system\nso\n")


def test_replies_in_another_chat_format_keep_the_tools_of_their_prompts(tmp_path: Path, tiny_model_dir: Path):
    settings = runs.words(tmp_path, tiny_model_dir, RARELY.format(folder=tmp_path), runs.NO_EVAL)
    look_up = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    data = tmp_path / "sums.jsonl"
    rows = [json.loads(line) | {"tools": [look_up]} for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = start_run(load([*settings, "rollout={max_tokens: 24, stop: [e, i]}", "name=rl"])).path
    section = f"sft={{data: null, rollouts: {{run: {path}, keep: all}}, validation_rows: 0, sequences_per_step: 1}}"
    parts, found = built(sft_runs.recipe(tmp_path, tiny_model_dir, *NO_EVAL, section, "chat.system=so"))
    assert found.train
    assert all("look_up" in parts.policy.chat.decode(one.prompt_ids) for one in found.train)
    stored = RunDirectory.open(path)
    of_file, of_programs = {"kind": "file", "verifier": {"kind": "verifiers"}}, {"kind": "agent"}
    for task, whole_ones in ((of_file, True), ({"kind": "mixed", "tasks": {"shop": {"task": of_programs}}}, False)):
        stored.recipe_path.write_text(yaml.safe_dump(stored.settings() | {"task": task}))
        given, _ = read_replies(Rollouts(run=str(path), keep="all"))
        assert {one.sampled.whole for one in given if one.sampled} == {whole_ones}


def test_only_right_replies_are_learnt_from(tmp_path: Path, tiny_model_dir: Path):
    path = rl_run(tmp_path, tiny_model_dir)
    run = RunDirectory.open(path)
    right = [
        row for step in rollout_steps(run) for row in read_rollouts(run, step) if row.right and row.finish == "stop"
    ]
    assert right, "one of the replies must be right by chance"
    given, notes = read_replies(Rollouts(run=str(path), per_prompt=99))
    assert {one.sampled.ids for one in given if one.sampled} == {row.ids for row in right}
    assert f"of 24 sampled ones {len(right)} are correct and finished" in notes[0]
    once, _ = read_replies(Rollouts(run=str(path), per_prompt=1))
    assert len(once) == len({row.prompt_id for row in right})
    with pytest.raises(DataError, match=r"first_step=99, but the last step with replies is 3") as raised:
        read_replies(Rollouts(run=str(path), first_step=99))
    assert raised.value.fix == "set sft.rollouts.first_step to 3 or less"


def test_losses_are_finite_numbers(tmp_path: Path, tiny_model_dir: Path):
    run = sft_runs.trained(tmp_path, tiny_model_dir, *NO_EVAL)
    assert all(math.isfinite(row.metrics["sft/loss"]) for row in read_metrics(run) if row.step)


def test_a_resume_over_other_rows_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = sft_runs.trained(tmp_path, tiny_model_dir, *NO_EVAL)
    data = tmp_path / "rows.jsonl"
    data.write_text(data.read_text().replace("3", "4"))
    with pytest.raises(DataError, match="the training rows changed since the run started"):
        resume_run(run.path)
