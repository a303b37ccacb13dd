"""When completions end, what is refused, and how often a prompt is processed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.errors import EngineError, StaleWeightsError, SyncError
from lockstep.rollout.native import NativeEngine
from lockstep.types import Completion, FinishReason, Sampling
from tests.learner.models import VOCAB, plain, tokens, twin
from tests.rollout.engines import engine_over, finish, request, spelled

PROMPT = tokens(6, 6)


@cache
def model() -> nn.Module:
    return twin(plain("llama"))


def complete(sampling: Sampling, *, stop_ids: Sequence[int] = (), seed: int = 5) -> Completion:
    return finish(engine_over(model(), stop_ids=stop_ids), [request("one", PROMPT, sampling, seed=seed)])["one"]


@cache
def free() -> Completion:
    """What the model says when nothing stops it."""
    done = complete(Sampling(30))
    assert done.finish is FinishReason.LENGTH
    assert len(done.ids) == 30
    assert len(set(done.ids)) > 20
    return done


# --- stopping -------------------------------------------------------------------------------------------------------
def test_an_end_token_is_kept_and_ends():
    end = free().ids[11]
    done = complete(Sampling(30), stop_ids=[end])
    first = free().ids.index(end)
    assert done.ids == free().ids[: first + 1]
    assert done.logprobs == free().logprobs[: first + 1]
    assert done.finish is FinishReason.STOP


def test_an_end_token_may_be_the_first():
    done = complete(Sampling(30), stop_ids=[free().ids[0]])
    assert (done.ids, done.finish) == (free().ids[:1], FinishReason.STOP)


@pytest.mark.parametrize("budget", [1, 2, 17])
def test_the_budget_ends(budget: int):
    done = complete(Sampling(budget))
    assert (done.ids, done.finish) == (free().ids[:budget], FinishReason.LENGTH)


def test_an_end_token_on_the_last_place_is_a_stop():
    end = free().ids[9]
    last = free().ids.index(end)
    assert complete(Sampling(last + 1), stop_ids=[end]).finish is FinishReason.STOP


def test_ignore_eos_stops_neither_at_tokens_nor_at_strings():
    ends = range(3, VOCAB)
    done = complete(Sampling(30, ignore_eos=True, stop=(",",)), stop_ids=list(ends))
    assert (done.ids, done.logprobs, done.finish) == (free().ids, free().logprobs, FinishReason.LENGTH)


@pytest.mark.parametrize("place", [0, 1, 12, 28])
def test_a_stop_string_that_spans_tokens_ends_with_the_token_that_completes_it(place: int):
    text = spelled(free().ids)
    stop = text[4 * place + 2 : 4 * place + 6]  # "7,01" of "127,013,"
    completed_by = (text.index(stop) + len(stop) - 1) // 4
    done = complete(Sampling(30, stop=("never", stop)))
    assert done.ids == free().ids[: completed_by + 1]
    assert done.logprobs == free().logprobs[: completed_by + 1]
    assert done.finish is FinishReason.STOP
    assert stop in spelled(done.ids)
    assert stop not in spelled(done.ids[:-1])


def test_a_stop_string_within_one_token():
    stop = f"{free().ids[7]:03d}"
    done = complete(Sampling(30, stop=(stop,)))
    assert done.ids == free().ids[: free().ids.index(int(stop)) + 1]


def test_the_shortest_of_several_stops_wins():
    early, late = f"{free().ids[4]:03d},", f"{free().ids[20]:03d},"
    done = complete(Sampling(30, stop=(late, early)))
    assert len(done.ids) == 1 + min(free().ids.index(free().ids[4]), free().ids.index(free().ids[20]))


def test_a_stop_string_as_long_as_the_reply_is_found():
    """Longer than the window of tokens in which ordinary stop strings are looked for."""
    long = complete(Sampling(150))
    stop = spelled(long.ids[:120])
    done = complete(Sampling(150, stop=(stop,)))
    assert (done.ids, done.finish) == (long.ids[:120], FinishReason.STOP)


def test_a_stop_string_of_characters_that_take_several_tokens():
    """One token in four writes a character here, as with characters of four bytes."""

    def sparse(ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in ids if token % 4 == 0)

    engine = engine_over(model(), decode=sparse)
    long = finish(engine, [request("one", PROMPT, Sampling(200), seed=5)])["one"]
    written = [place for place, token in enumerate(long.ids) if token % 4 == 0]
    first, last = next(
        (a, b) for a, b in zip(written, written[23:], strict=False) if 72 < b - a < 4 * 24
    )  # 24 characters in more tokens than are looked at for short stop strings
    stop = sparse(long.ids[first : last + 1])
    done = finish(engine, [request("one", PROMPT, Sampling(200, stop=(stop,)), seed=5)])["one"]
    assert done.ids == long.ids[: last + 1]


def test_stop_strings_with_a_real_tokenizer(tiny_model_dir: Path):
    """Characters of several bytes are spread over tokens: the text is decoded as a whole."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    speaker = twin(AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval())
    spoken = finish(
        engine_over(speaker, 8, decode=tokenizer.decode),
        [request(str(i), tokens(4, i), Sampling(60), seed=i) for i in range(8)],
    )
    checked = 0
    for done in spoken.values():
        text = tokenizer.decode(done.ids)
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        if "�" in stop or len(stop) < 3:
            continue
        again = finish(
            engine_over(speaker, decode=tokenizer.decode),
            [request("x", done.request.prompt_ids, Sampling(60, stop=(stop,)), seed=done.request.seed)],
        )["x"]
        shortest = next(n for n in range(1, 61) if stop in tokenizer.decode(done.ids[:n]))
        assert (again.ids, again.finish) == (done.ids[:shortest], FinishReason.STOP)
        checked += 1
    assert checked >= 3


def test_stops_of_one_request_are_not_those_of_another():
    stop = f"{free().ids[7]:03d},"
    done = finish(
        engine_over(model()),
        [
            request("stopped", PROMPT, Sampling(30, stop=(stop,)), group="g", seed=5),
            request("free", PROMPT, Sampling(30), group="g", seed=5),
        ],
    )
    assert done["free"].ids == free().ids
    assert len(done["stopped"].ids) < 30


# --- prefill --------------------------------------------------------------------------------------------------------
class Counted:
    """How often each token went through the model's embedding."""

    def __init__(self, watched: nn.Module) -> None:
        self.tokens: Counter[int] = Counter()
        self.passes = 0
        self._handle = watched.get_input_embeddings().register_forward_hook(self._count)  # type: ignore[operator]

    def _count(self, module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.tokens.update(inputs[0].flatten().tolist())
        self.passes += 1

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *failure: object) -> None:
        self._handle.remove()


@pytest.mark.parametrize("slots", [1, 3, 4, 64])
@pytest.mark.parametrize("kept", [1, 12])
def test_a_prompt_is_processed_once_for_its_group(slots: int, kept: int):
    """Prompts carry marks that are never sampled; each mark must pass the model once, however long its group waits."""
    marks = (VOCAB - 1, VOCAB - 2, VOCAB - 3)
    wanted = [
        request(
            f"{mark}/{i}", (*tokens(9, mark, high=VOCAB - 3), mark, 5), Sampling(kept), group=str(mark), seed=mark + i
        )
        for mark in marks
        for i in range(7)
    ]
    mixed = sorted(wanted, key=lambda r: r.id[-1])  # the groups take turns
    for order in (wanted, mixed):
        with Counted(model()) as counted:
            done = finish(engine_over(model(), slots), order)
        assert not any(mark in d.ids for d in done.values() for mark in marks), "choose other seeds"
        assert [counted.tokens[mark] for mark in marks] == [1, 1, 1]


def test_a_group_that_comes_back_later_is_processed_again():
    """Nothing is kept of a finished group: the weights may have changed since."""
    engine, mark = engine_over(model(), 2), VOCAB - 1
    wanted = [request(str(i), (7, mark), Sampling(3), group="g", seed=i) for i in range(3)]
    with Counted(model()) as counted:
        first = finish(engine, wanted)
        second = finish(engine, wanted)
        engine.load(iter(()), 0)
        third = finish(engine, wanted)
    assert first == second == third
    assert counted.tokens[mark] == 3


def test_what_all_prompts_begin_with_is_processed_once_per_version():
    begins, mark = (*tokens(11, 1, high=VOCAB - 1), VOCAB - 1), VOCAB - 1
    wanted = [
        request(f"{n}/{i}", (*begins, *tokens(n, n, high=VOCAB - 1)), Sampling(4), group=str(n), seed=i, prefix=12)
        for n in (1, 6, 30)
        for i in range(3)
    ]
    alone = [request(r.id, r.prompt_ids, r.sampling, group=r.group, seed=r.seed) for r in wanted]
    engine = engine_over(model(), 2)
    with Counted(model()) as counted:
        shared = finish(engine, wanted[:6]) | finish(engine, wanted[6:])
    assert counted.tokens[mark] == 1
    with Counted(model()) as counted:
        engine.load(iter(()), 1)
        finish(engine, [request("a", wanted[0].prompt_ids, Sampling(1), version=1, prefix=12)])
    assert counted.tokens[mark] == 1, "the weights are others now"
    with Counted(model()) as counted:
        apart = finish(engine_over(model(), 2), alone)
    assert counted.tokens[mark] == 3
    for id, done in shared.items():
        assert done.ids == apart[id].ids
        assert done.logprobs == pytest.approx(apart[id].logprobs, abs=1e-4)


def test_slots_are_decoded_side_by_side():
    """Eight samples of ten tokens: a pass for the prompt, then one a token for all of them."""
    wanted = [request(str(i), PROMPT, Sampling(10), group="g", seed=i) for i in range(8)]
    with Counted(model()) as together:
        finish(engine_over(model(), 8), wanted)
    with Counted(model()) as halves:
        finish(engine_over(model(), 4), wanted)
    assert together.passes == 1 + 9
    assert halves.passes == 1 + 2 * 9


def test_many_prompts_share_a_pass():
    with Counted(model()) as counted:
        finish(engine_over(model(), 8), [request(str(i), tokens(20 + i, i), Sampling(1)) for i in range(8)])
    assert counted.passes == 1


# --- refusals -------------------------------------------------------------------------------------------------------
def test_other_versions_are_refused():
    engine = engine_over(model())
    with pytest.raises(StaleWeightsError, match="needs version 1 of the weights, but the engine holds version 0"):
        engine.submit([request("a", PROMPT, Sampling(3)), request("b", PROMPT, Sampling(3), version=1)])
    assert list(engine.completed()) == [], "nothing of a refused submission may run"
    engine.load(iter(()), 1)
    assert finish(engine, [request("c", PROMPT, Sampling(3), version=1)])["c"].version == 1
    with pytest.raises(StaleWeightsError):
        engine.submit([request("d", PROMPT, Sampling(3), version=0)])


def test_a_fresh_engine_serves_no_version():
    engine = NativeEngine(model(), slots=1, stop_ids=frozenset(), decode=spelled)
    with pytest.raises(StaleWeightsError):
        engine.submit([request("a", PROMPT, Sampling(3))])


@pytest.mark.parametrize(
    ("prompt", "budget", "told"),
    [
        ((), 3, "has an empty prompt"),
        (PROMPT, 0, "allows no new token"),
        (PROMPT, 507, "exceed the model's context of 512"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: tuple[int, ...], budget: int, told: str):
    engine = engine_over(model())
    with pytest.raises(EngineError, match=told):
        engine.submit([request("bad", prompt, Sampling(budget))])
    assert list(engine.completed()) == []


def test_the_whole_context_can_be_used():
    done = finish(engine_over(model()), [request("a", tokens(500, 1), Sampling(12))])["a"]
    assert len(done.ids) == 12


@pytest.mark.parametrize("prefix", [-1, 6, 7])
def test_a_prefix_must_leave_something_of_the_prompt(prefix: int):
    with pytest.raises(EngineError, match=f"the shared prefix has {prefix} tokens"):
        engine_over(model()).submit([request("a", PROMPT, Sampling(3), prefix=prefix)])


def test_short_requests_after_long_ones_that_still_wait():
    """Room is made for what is queued, not for what came last."""
    wanted = [request("long", tokens(100, 1), Sampling(30)), request("short", tokens(3, 1), Sampling(2))]
    engine = engine_over(model(), 1)
    for one in wanted:
        engine.submit([one])
    found = {completion.request.id: completion for completion in engine.completed()}
    assert found == {r.id: finish(engine_over(model(), 1), [r])[r.id] for r in wanted}


def test_two_prompts_under_one_group_are_refused():
    engine = engine_over(model())
    with pytest.raises(EngineError, match="group g have different prompts"):
        engine.submit([request("a", (5, 6), Sampling(2), group="g"), request("b", (5, 7), Sampling(2), group="g")])
    engine.submit([request("a", (5, 6), Sampling(2), group="g")])
    with pytest.raises(EngineError, match="group g have different prompts"):
        engine.submit([request("b", (5, 7), Sampling(2), group="g")])


def test_no_weights_arrive_while_requests_run():
    engine = engine_over(model(), 1)
    engine.submit([request(str(i), PROMPT, Sampling(3), group="g", seed=i) for i in range(3)])
    with pytest.raises(EngineError, match="3 requests run"):
        engine.load(iter(()), 1)
    reading = engine.completed()
    next(reading)
    with pytest.raises(EngineError, match="2 requests run"):
        engine.load(iter(()), 1)
    assert len(list(reading)) == 2
    engine.load(iter(()), 1)
    assert engine.version == 1


def test_loaded_weights_sample():
    other = twin(plain("llama", seed=1))
    engine = engine_over(twin(plain("llama")))
    wanted = request("a", PROMPT, Sampling(10), seed=5)
    before = finish(engine, [wanted])
    engine.load(((name, parameter.detach()) for name, parameter in other.named_parameters()), 0)
    after = finish(engine, [wanted])
    assert after != before
    assert after == finish(engine_over(other), [wanted])


def test_weights_of_another_shape_are_refused_by_name():
    engine = engine_over(twin(plain("llama")))
    with pytest.raises(SyncError, match=r"lm_head\.weight"):
        engine.load(iter([("lm_head.weight", torch.zeros(3, 3))]), 1)
    with pytest.raises(SyncError, match="no tensor of this name"):
        engine.load(iter([("lm_head.weights", torch.zeros(3, 3))]), 1)
