from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from lockstep.chat import ChatFormat
from lockstep.config.schema import Chat, EvalMode
from lockstep.errors import ChatError, EngineError, EvaluationError, StaleWeightsError
from lockstep.evaluation.compare import compare
from lockstep.evaluation.intervals import wilson
from lockstep.evaluation.plan import EvalPlan
from lockstep.evaluation.records import read_score, score_path, write_score
from lockstep.evaluation.runner import data_hash, evaluate, is_correct, reasoning_effort
from lockstep.seeds import seed_for
from lockstep.types import Completion, Forward, Grade, Message, NormNoise, Probe, Prompt, Proof, Request, Score
from tests.chat.toy_tokenizers import chatml
from tests.evaluation.scores import PROOF
from tests.evaluation.toys import Sums, TableEngine

CHAT = ChatFormat(chatml(), Chat(suffix=" now"))
PLAN = EvalPlan("toy", "fp32", "native", "id_probe", 20, 8, 5, "numeric")
GREEDY = EvalMode()
SAMPLED = EvalMode(name="sampled", temperature=1.0, samples=4)
ANSWERS = {p.id: p.answer for p in Sums().heldout("id_probe", 100)}


def run(
    engine: TableEngine,
    mode: EvalMode = GREEDY,
    plan: EvalPlan = PLAN,
    proof: Proof = PROOF,
    step: int = 0,
    **more: Any,
) -> Score:
    """Evaluate the sums."""
    return evaluate(engine, Sums(), CHAT, mode, plan, proof, step=step, **more)


def always_right(request: Request) -> str:
    return ANSWERS[request.group]


def right_below(n: int) -> object:
    return lambda request: ANSWERS[request.group] if int(request.group.split("/")[1]) < n else "no"


def test_a_score_holds_what_was_measured_and_how() -> None:
    engine = TableEngine(CHAT, right_below(15))  # type: ignore[arg-type]
    score = run(engine, step=40)
    assert (score.accuracy, score.items, score.samples, score.unscored) == (0.75, 20, 1, 0)
    assert (score.low, score.high) == (wilson(15, 20).low, wilson(15, 20).high)
    assert (score.step, score.version, score.proof) == (40, 3, PROOF)
    c = score.conditions
    assert (c.weights, c.model, c.numerics, c.engine) == (PROOF.fingerprint, "toy", "fp32", "native")
    assert (c.mode, c.task, c.max_tokens, c.seed) == ("greedy", "sums/id_probe/numeric", 8, 0)
    assert c.template_hash == CHAT.template_hash
    assert c.data_hash == data_hash(Sums().heldout("id_probe", 20))
    first = score.results[0]
    assert (first.id, first.sample, first.correct, first.reward) == ("id_probe/0", 0, True, 1.0)
    assert (first.text, first.answer, first.extracted, first.truncated) == ("0", "0", "0", False)
    assert first.tokens == 2  # "0" and the end token
    assert [r.correct for r in score.results] == [True] * 15 + [False] * 5
    assert score.seconds > 0


def test_requests_render_the_chat_share_groups_and_have_seeds_of_their_own() -> None:
    engine = TableEngine(CHAT, always_right)
    run(engine, SAMPLED)
    assert len(engine.asked) == 80
    assert len({r.seed for r in engine.asked}) == 80
    request = engine.asked[5]
    assert (request.id, request.group, request.version) == ("id_probe/1#1", "id_probe/1", 3)
    assert request.seed == seed_for("eval", 5, "id_probe/1", 1)
    assert request.prompt_ids == CHAT.render([Message(role="user", content="0 + 1 =")])
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.top_p) == (1.0, 8, 1.0)


def test_seeds_do_not_depend_on_the_step_or_the_weights() -> None:
    seeds = []
    for step, version in [(0, 3), (50, 9)]:
        engine = TableEngine(CHAT, always_right, version)
        proof = dataclasses.replace(PROOF, version=version, fingerprint=f"{version:016x}")
        run(engine, SAMPLED, PLAN, proof, step)
        seeds.append([r.seed for r in engine.asked])
    assert seeds[0] == seeds[1]


def test_several_samples_count_an_item_once_and_interval_over_items() -> None:
    # Item 0: all four right; item 1: one of four; item 2: two unscored, of the others one right; item 3: unscored.
    def answers(request: Request) -> str:
        item, sample = map(int, request.id.split("/")[1].split("#"))
        table = ["rrrr", "rwww", "??rw", "????"]
        return {"r": ANSWERS[request.group], "w": "no", "?": "?"}[table[item][sample]]

    score = run(TableEngine(CHAT, answers), SAMPLED, dataclasses.replace(PLAN, items=4))
    assert score.accuracy == pytest.approx((1 + 0.25 + 0.5) / 3)
    assert (score.items, score.samples, score.unscored) == (4, 4, 6)
    assert 0.25 <= score.low < score.accuracy < score.high <= 1.0
    assert score.conditions.mode == "sampled(T=1,n=4)"
    assert score.conditions.seed == 5
    unscored = [r for r in score.results if r.id == "id_probe/3"]
    assert all(r.correct is None and r.reward is None for r in unscored)


def test_an_unscored_reply_is_not_a_wrong_one() -> None:
    engine = TableEngine(CHAT, lambda r: "?" if r.group == "id_probe/0" else ANSWERS[r.group])
    score = run(engine)
    assert (score.accuracy, score.unscored, score.items) == (1.0, 1, 20)
    assert (score.low, score.high) == (wilson(19, 19).low, 1.0)


def test_truncation_is_the_engines_word_and_length_is_in_tokens() -> None:
    engine = TableEngine(CHAT, lambda r: "7 " * 20 if r.group == "id_probe/0" else "7")
    score = run(engine)
    assert score.truncated == 1 / 20
    assert score.results[0].truncated
    assert score.results[0].tokens == 8
    assert score.mean_tokens == (8 + 19 * 2) / 20


def test_the_same_evaluation_twice_is_the_same_and_touches_no_global_random_state() -> None:
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]
    scores = [run(TableEngine(CHAT, always_right), SAMPLED) for _ in range(2)]
    assert dataclasses.replace(scores[0], seconds=0.0) == dataclasses.replace(scores[1], seconds=0.0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index, union-attr]


def test_progress_is_told_of_every_reply() -> None:
    seen: list[tuple[int, int]] = []
    run(TableEngine(CHAT, always_right), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 20) for i in range(1, 21)]


def test_from_engine_to_file_to_verdict(tmp_path) -> None:  # type: ignore[no-untyped-def]
    trained_proof = dataclasses.replace(PROOF, fingerprint="b" * 16, version=4)
    base = run(TableEngine(CHAT, right_below(5)))  # type: ignore[arg-type]
    trained = run(TableEngine(CHAT, right_below(18), 4), GREEDY, PLAN, trained_proof, 50)  # type: ignore[arg-type]
    for score in (base, trained):
        write_score(score_path(tmp_path, score.step, "greedy"), score)
    comparison = compare(read_score(score_path(tmp_path, 0, "greedy")), read_score(score_path(tmp_path, 50, "greedy")))
    assert (comparison.b, comparison.c, comparison.verdict.value) == (0, 13, "improved")
    assert comparison.p == 2 / 2**13


# --- weights that are not proven -------------------------------------------------------------------------------------
FAILED_PROBE = Probe(tokens=8, mean=0.2, p99=0.5, max=0.9, tolerance=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mismatched": ("model.layers.0.mlp.up_proj.weight: differs",)}, "up_proj.weight: differs"),
        ({"probe": FAILED_PROBE}, "log-probability probe"),
        ({"version": 2}, "the engine has weights of version 3, but the proof is for version 2"),
    ],
)
def test_nothing_is_sampled_without_a_proof(changes: dict[str, object], says: str) -> None:
    engine = TableEngine(CHAT, always_right)
    proof = dataclasses.replace(PROOF, **changes)  # type: ignore[arg-type]
    with pytest.raises(StaleWeightsError, match=says):
        run(engine, GREEDY, PLAN, proof)
    assert engine.asked == []


def test_nothing_is_sampled_with_noise_on_the_weights() -> None:
    engine = TableEngine(CHAT, always_right)
    engine.set_forward(Forward(noise=NormNoise(0.01, 1, ("model.norm.weight",), (1.0,))))
    with pytest.raises(StaleWeightsError, match=r"noise of sigma 0\.01 is still applied to 1 norm"):
        run(engine)
    assert engine.asked == []
    engine.set_forward(Forward("mxfp4-w4a4"))
    labelled = dataclasses.replace(PLAN, numerics="mxfp4-w4a4(floor, fp32)")
    assert run(engine, GREEDY, labelled).accuracy == 1.0


class Swapping(TableEngine):
    """Takes over other weights in the middle of the work."""

    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        for i, completion in enumerate(super().completed()):
            yield completion
            if i == self.swap_at:
                self.version += 1

    swap_at = 9


def test_weights_that_change_during_an_evaluation_are_noticed() -> None:
    with pytest.raises(StaleWeightsError, match="version 4 of the weights, but version 3 was requested"):
        run(Swapping(CHAT, always_right))
    late = Swapping(CHAT, always_right)
    late.swap_at = 19  # after the last reply was sampled
    with pytest.raises(StaleWeightsError, match="the engine has weights of version 4"):
        run(late)


# --- engines and tasks that do not keep their word --------------------------------------------------------------------
class Forgetful(TableEngine):
    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        return (c for c in super().completed() if c.request.group != "id_probe/7")


class Doubling(TableEngine):
    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        for completion in super().completed():
            yield completion
            yield completion


class Leftover(TableEngine):
    def completed(self, between: Callable[[], None] | None = None) -> Iterator[Completion]:
        stray = dataclasses.replace(self.waiting[0], id="train/1#0")
        self.waiting.append(stray)
        return super().completed()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Forgetful, "request id_probe/7#0: the engine did not complete 1 requests"),
        (Doubling, "id_probe/19#0: the engine returned a reply that was not requested"),
        (Leftover, "train/1#0: the engine returned a reply that was not requested"),
    ],
)
def test_every_request_is_answered_exactly_once(kind: type[TableEngine], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        run(kind(CHAT, always_right))


def test_too_few_items_are_refused_with_the_number_there_is() -> None:
    plan = dataclasses.replace(PLAN, items=150)
    with pytest.raises(EvaluationError, match="150 items of id_probe were requested, but the task gave 100") as caught:
        run(TableEngine(CHAT, always_right), GREEDY, plan)
    assert caught.value.fix == "set eval.items=100 (in `lockstep eval`: --items 100)"


class Twins(Sums):
    def heldout(self, role: str, size: int) -> Sequence[Prompt]:
        return [dataclasses.replace(p, id="same") for p in super().heldout(role, size)]


def test_items_of_one_id_are_refused() -> None:
    with pytest.raises(EvaluationError, match="two items have the id same"):
        evaluate(TableEngine(CHAT, always_right), Twins(), CHAT, GREEDY, PLAN, PROOF, step=0)


def test_an_evaluation_of_which_nothing_can_be_scored_is_an_error_with_the_reason() -> None:
    engine = TableEngine(CHAT, lambda request: "?")
    with pytest.raises(EvaluationError, match=r"none of the 20 replies .*; the first reason: the reply is a question"):
        run(engine)


def test_a_prompt_without_room_for_a_reply_is_named() -> None:
    tokens = len(CHAT.render([Message(role="user", content="0 + 0 =")]))
    fits = dataclasses.replace(PLAN, items=1, context=tokens + 8)
    run(TableEngine(CHAT, always_right), GREEDY, fits)
    short = dataclasses.replace(fits, context=tokens + 7)
    with pytest.raises(ChatError, match="prompt id_probe/0"):
        run(TableEngine(CHAT, always_right), GREEDY, short)


# --- small parts ------------------------------------------------------------------------------------------------------
def test_what_counts_as_correct() -> None:
    assert is_correct(Grade(1.0)) is True
    assert is_correct(Grade(0.99)) is False
    assert is_correct(Grade(0.1, {"correct": 1.0})) is True
    assert is_correct(Grade(1.5, {"correct": 0.0})) is False
    assert is_correct(Grade(None, error="x")) is None
    assert is_correct(Grade(math.nan)) is None
    assert is_correct(Grade(math.inf)) is None


def test_the_data_hash_sees_ids_messages_answers_and_order() -> None:
    a = Prompt("a", (Message(role="user", content="q"),), "1")
    b = Prompt("b", (Message(role="user", content="q"),), "1")
    hashes = [
        data_hash([a, b]),
        data_hash([b, a]),
        data_hash([a]),
        data_hash([a, dataclasses.replace(b, answer="2")]),
        data_hash([a, dataclasses.replace(b, messages=(Message(role="user", content="r"),))]),
        data_hash([a, dataclasses.replace(b, messages=(Message(role="system", content="q"),))]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert data_hash([a, dataclasses.replace(b, data={"note": 1})]) == hashes[0]
    assert len(hashes[0]) == 16


# --- modes, roles and what the conditions say ----------------------------------------------------------------------
def test_one_set_of_replies_gives_every_estimate_of_its_mode() -> None:
    def answers(request: Request) -> str:
        item, sample = map(int, request.id.split("/")[1].split("#"))
        return {"r": ANSWERS[request.group], "x": "no", "y": "nay"}[["rxxx", "rrry", "xyxy", "rryx"][item][sample]]

    mode = EvalMode(name="pass@4", temperature=1.0, samples=4)
    engine = TableEngine(CHAT, answers)
    score = run(engine, mode, dataclasses.replace(PLAN, items=4))
    assert len(engine.asked) == 16
    found = {one.name: one.value for one in score.estimates}
    assert found == {"pass@4": 0.75, "avg@4": (1 + 3 + 0 + 2) / 16, "maj@4": 0.5}
    assert score.accuracy == 0.75
    assert score.conditions.mode == "pass@4(T=1,n=4)"


def test_the_train_role_asks_training_questions() -> None:
    class Trained(Sums):
        def batch(self, step: int, size: int) -> Sequence[Prompt]:
            assert step == 0
            return self.heldout("train", size)

    score = evaluate(
        TableEngine(CHAT, lambda r: "1"),
        Trained(),
        CHAT,
        GREEDY,
        dataclasses.replace(PLAN, role="train"),
        PROOF,
        step=0,
    )
    assert score.conditions.task == "sums/train/numeric"
    assert score.results[0].id == "train/0"


def test_suffix_and_reasoning_effort_are_conditions() -> None:
    score = run(TableEngine(CHAT, always_right), source="mine")
    assert (score.conditions.prompt_suffix, score.conditions.reasoning_effort, score.source) == (" now", "", "mine")
    tokenizer = chatml()
    tokenizer.chat_template = "{{ reasoning_effort }}" + str(tokenizer.chat_template)
    high = ChatFormat(tokenizer, Chat(template_kwargs={"reasoning_effort": "high"}))
    assert reasoning_effort(high) == "reasoning_effort=high"


def test_a_reply_keeps_how_it_was_read_and_why_it_was_not() -> None:
    answers = {"id_probe/0": "?"}
    score = run(TableEngine(CHAT, lambda r: answers.get(r.group, "no")))
    assert (score.results[0].error, score.results[0].method) == ("the reply is a question mark", "")
    assert (score.results[1].method, score.results[1].boxed) == ("whole", None)
