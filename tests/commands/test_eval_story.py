"""Note 000 of the field notes, on the real SmolLM2-135M: a LoRA trained under MXFP4 W4A4, saved, and evaluated afterwards.

What happened to its author: the checkpoint was loaded into the trainer and never sent to the engine, so that BF16 and MXFP4 both
scored 8.49 %, as the base did; then another script forgot the quantisation and said 73.31 %. Each chapter is one of these.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.build.build import build_weight_sync
from lockstep.cli import main
from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import StaleWeightsError, SyncError
from lockstep.evaluation.records import read_score, score_path, write_score
from lockstep.evaluation.runner import require_proof
from lockstep.rollout.native import NativeEngine
from lockstep.scoring.targets import EvalSession, build_eval_session, find_target
from lockstep.types import ItemResult, Score, WeightStream
from tests.saying import shell

STEPS, ITEMS, DIGITS = 5, 20, 8
LABEL = "mxfp4-w4a4(floor, bf16)"
RECIPE = """
name: story
loop: sft
steps: {steps}
threads: 1
device: cpu
runs_dir: {folder}/runs
model: {{path: smollm2-135m-instruct, dtype: bf16}}
adapter: {{kind: lora}}
numerics: {{train: mxfp4-w4a4}}
task: {{kind: file, data: {folder}/asked.jsonl, heldout_rows: {items}, verifier: {{kind: numeric, fallback: none}}}}
chat: {{suffix: "\\nPut your final answer in \\\\boxed{{}}."}}
sft: {{data: {folder}/shown.jsonl, sequences_per_step: 8, max_tokens: 96, validation_rows: 8}}
optimizer: {{lr: 1.0e-3}}
rollout: {{max_tokens: 16, slots: 64}}
eval: {{items: {items}, at_start: false, modes: [{{name: greedy}}]}}
save: {{every: {steps}}}
"""


def lockstep(*words: object, code: int = 0) -> str:
    """What a fresh process says."""
    result = shell(*words)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def train(folder: Path) -> Path:
    """Five steps teach the form of an answer: a number of eight digits, copied into a box. The base never writes a box."""
    numbers = random.Random(0).sample(range(10 ** (DIGITS - 1), 10**DIGITS), 104)
    for name, chosen, answer in (("asked", numbers[:80], "{}"), ("shown", numbers[80:], "\\boxed{{{}}}")):
        rows = [{"prompt": f"Write the number {n}.", "answer": answer.format(n)} for n in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, steps=STEPS, items=ITEMS))
    said = lockstep("train", folder / "recipe.yaml")
    assert f"numerics: training in {LABEL}, 210 linear layers quantised" in said
    return folder / "runs" / "story"


def with_replies_of(score: Score, other: Score) -> Score:
    """The score as it would be if its engine had said what the other's did."""
    replies: tuple[ItemResult, ...] = other.results
    return dataclasses.replace(score, results=replies, accuracy=other.accuracy, estimates=other.estimates)


class Deaf(NativeEngine):
    """Has weights of its own. The base arrives; of all that follows only the version does."""

    def load(self, weights: WeightStream, version: int) -> None:
        super().load(weights if version == 0 else iter(()), version)


def deaf_session(recipe: Recipe) -> EvalSession:
    session = build_eval_session(recipe)
    policy = session.policy
    decode: Any = policy.tokenizer.decode
    engine = Deaf(copy.deepcopy(policy.model), slots=8, stop_ids=frozenset(policy.chat.stop_ids), decode=decode)
    sent = recipe.model_copy(update={"sync": recipe.sync.model_copy(update={"transport": "copy"})})
    return dataclasses.replace(session, engine=engine, sync=build_weight_sync(policy, sent))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two and a half minutes of one core
@pytest.mark.usefixtures("smollm2_dir")
def test_the_story_of_note_000(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path)
    w4a4, bf16 = two_labelled_scores(run, tmp_path)
    two_alike_are_an_alarm(run, w4a4, bf16, capsys)
    an_engine_that_was_not_synced_is_refused(run, monkeypatch, capsys)


def two_labelled_scores(run: Path, folder: Path) -> tuple[Score, Score]:
    """Measured in processes of their own: the numerics of the training unless others are asked for, and both beside the base.

    Measured when this was written: base 0 of 40 in both, W4A4 29, BF16 all 40. Other processors round otherwise, so what is asked
    for is the order, and a base that writes no boxes.
    """
    said = lockstep("eval", run, "--with-base", "--out", folder / "default")
    assert f"as saved, in {LABEL}" in said
    assert f"{LABEL}: 210 linear layers quantised" in said
    assert f"greedy: all {ITEMS} replies are those of the stored score" in said  # as training itself measured it
    said = lockstep("eval", run, "--with-base", "--numerics", "bf16", "--out", folder / "bf16")
    assert "as saved, in bf16" in said
    assert "layers quantised" not in said
    names = [f"story_step_{step:06d}_greedy.json" for step in (0, STEPS)]
    (base4, w4a4), (base16, bf16) = ([read_score(folder / d / name) for name in names] for d in ("default", "bf16"))
    assert [one.conditions.numerics for one in (base4, w4a4, base16, bf16)] == [LABEL, LABEL, "bf16", "bf16"]
    assert w4a4.conditions.weights == bf16.conditions.weights != base4.conditions.weights == base16.conditions.weights
    assert w4a4.results == read_score(score_path(run, STEPS, "greedy")).results
    assert max(base4.accuracy, base16.accuracy) < 0.1
    assert 0.2 < w4a4.accuracy < bf16.accuracy
    refused = lockstep("compare", *(folder / d / names[1] for d in ("default", "bf16")), code=7)
    assert f"numerics: {LABEL} against bf16" in refused
    return w4a4, bf16


def two_alike_are_an_alarm(run: Path, w4a4: Score, bf16: Score, capsys: pytest.CaptureFixture[str]) -> None:
    """Records with the same replies, as they were when neither weights nor numerics had arrived: the cause is named."""
    place = score_path(run, STEPS, "greedy")
    right = place.read_bytes()
    write_score(place, with_replies_of(w4a4, bf16))
    assert main(["eval", str(run), "--numerics", "bf16", "--no-base", "--fail-on-alarm"]) == 7
    assert f"numerics not applied? All {ITEMS} replies are the same, word for word" in capsys.readouterr().err
    place.write_bytes(right)
    base = read_score(run.parents[1] / "default" / "story_step_000000_greedy.json")
    write_score(score_path(run, 0, "greedy"), with_replies_of(base, w4a4))
    assert main(["eval", str(run), "--fail-on-alarm"]) == 7
    assert f"weights not loaded? All {ITEMS} replies are the same, word for word" in capsys.readouterr().err


def an_engine_that_was_not_synced_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine has the base, the checkpoint is loaded into the trainer's model alone, and then it is evaluated."""
    target = find_target(str(run))
    assert target.checkpoint is not None
    session = deaf_session(load([str(run / "recipe.yaml")]))
    base = session.prove()
    saved = session.read(target.checkpoint)
    with pytest.raises(SyncError, match="the engine's weights are not the learner's after a second push") as caught:
        session.prove_saved(saved)
    assert "lora_B: stale" in str(caught.value)
    assert "probe: mean |Δ log-probability|" in str(caught.value)
    with pytest.raises(StaleWeightsError, match=f"weights of version {saved.version}, but the proof is for version 0"):
        require_proof(session.engine, base)  # nor does the base's proof stand for it
    session.engine.version = 0  # and an engine that was never told of the checkpoint at all
    with pytest.raises(SyncError, match=f"engine 0, learner {saved.version}"):
        session.sync.verify(session.learner, session.engine)
    # The whole command: no score, and the code of a proof that failed.
    before = {path: path.read_bytes() for path in (run / "scores").rglob("*.json")}
    monkeypatch.setattr("lockstep.scoring.workers.build_eval_session", lambda *_, **__: session)
    capsys.readouterr()
    assert main(["eval", str(run), "--no-base"]) == 5
    captured = capsys.readouterr()
    assert "the engine's weights are not the learner's" in captured.err
    assert "pass@1" not in captured.out
    assert {path: path.read_bytes() for path in (run / "scores").rglob("*.json")} == before
