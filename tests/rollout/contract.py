"""What every rollout engine must do, as checks of an engine beside a plain transformers model with the same weights.

A check takes a `Subject`, whose engine is idle and has the reference's weights as version 0, and leaves it so. Which engines are
checked is said in test_contract.py; benchmarks/gpu_vllm_smoke.py runs the same checks where there is no pytest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.errors import EngineError, StaleWeightsError
from lockstep.types import Completion, FinishReason, Request, RolloutEngine, Sampling, TokenIds


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, and what is known about it."""

    engine: RolloutEngine
    reference: nn.Module
    """transformers' own forward pass over the weights of version 0."""
    other: nn.Module
    """The same architecture with other weights."""
    stop_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    vocab: int
    context: int
    tolerance: float
    """Largest mean |Δ log-probability| against the reference."""


Check = Callable[[Subject], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@contextmanager
def refuses(kind: type[Exception], match: str = "") -> Iterator[None]:
    """What is done within must raise `kind` with this text."""
    said = None
    try:
        yield
    except kind as error:
        said = str(error)
    assert said is not None, f"no {kind.__name__}"
    assert match in said, said


# --- shorthand ------------------------------------------------------------------------------------------------------
def tokens(subject: Subject, length: int, seed: int) -> TokenIds:
    """Ids that end nothing."""
    allowed = [token for token in range(3, subject.vocab) if token not in subject.stop_ids]
    drawn = np.random.default_rng(seed).choice(allowed, length)
    return tuple(int(token) for token in drawn)


def ask(
    name: str, prompt: TokenIds, sampling: Sampling, *, group: str = "", seed: int = 0, version: int = 0
) -> Request:
    return Request(name, prompt, group or name, seed, sampling, version)


def finish(subject: Subject, requests: Sequence[Request]) -> dict[str, Completion]:
    """Submit everything and read to the end; every request must be answered once, as it was asked."""
    subject.engine.submit(requests)
    done = list(subject.engine.completed())
    assert sorted(c.request.id for c in done) == sorted(r.id for r in requests)
    asked = {request.id: request for request in requests}
    for completion in done:
        assert completion.request == asked[completion.request.id]
        assert len(completion.ids) == len(completion.logprobs) <= completion.request.sampling.max_tokens
        assert all(0 <= token < subject.vocab for token in completion.ids)
        assert completion.version == subject.engine.version
    return {completion.request.id: completion for completion in done}


@torch.no_grad()
def logits_of(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """Of what follows each id, float64 on the CPU, [T, V]."""
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=device)).logits[0]
    return logits.double().cpu()


def expected(model: nn.Module, prompt: TokenIds, ids: TokenIds, sampling: Sampling) -> list[float]:
    """Log-probability of each id under the distribution that `sampling` draws from, by the reference."""
    rows = logits_of(model, (*prompt, *ids))[len(prompt) - 1 : -1]
    return [filtered(row.numpy(), sampling)[token] for row, token in zip(rows, ids, strict=True)]


def filtered(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Log-probabilities after temperature, top_k, top_p and min_p, -inf where cut."""
    scaled = logits_V / (sampling.temperature or 1.0)
    order = np.argsort(-scaled, kind="stable")
    order = order[: sampling.top_k] if sampling.top_k else order
    probs = np.exp(scaled[order] - scaled[order[0]])
    probs /= probs.sum()
    count = 1 + int(np.searchsorted(np.cumsum(probs)[:-1], sampling.top_p)) if sampling.top_p < 1 else len(order)
    order, probs = order[:count], probs[:count]
    kept = order[probs >= sampling.min_p * probs[0]]
    result = np.full(len(scaled), -math.inf)
    result[kept] = scaled[kept] - np.logaddexp.reduce(scaled[kept])
    return result


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Mean absolute difference where both are finite; a token at the very edge of a cut may be on either side of it."""
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if math.isfinite(b)]
    assert len(pairs) >= 0.95 * len(wanted)
    return float(np.mean([abs(a - b) for a, b in pairs]))


def free(subject: Subject, count: int, budget: int, *, seed: int = 0) -> list[Completion]:
    """Samples that nothing stops, one of each of several prompts."""
    asked = [
        ask(f"{seed}/{i}", tokens(subject, 3 + 5 * i, seed + i), Sampling(budget, ignore_eos=True), seed=seed + i)
        for i in range(count)
    ]
    return list(finish(subject, asked).values())


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


# --- sampling -------------------------------------------------------------------------------------------------------
@check
def a_budget_is_kept_to_the_token(subject: Subject) -> None:
    for budget in (1, 2, 17):
        for done in free(subject, 3, budget):
            assert (len(done.ids), done.finish) == (budget, FinishReason.LENGTH)


@check
def an_end_token_is_kept_and_ends(subject: Subject) -> None:
    asked = [ask(str(i), tokens(subject, 4 + i, i), Sampling(200), seed=i) for i in range(16)]
    ended = 0
    for done in finish(subject, asked).values():
        ends = [place for place, token in enumerate(done.ids) if token in subject.stop_ids]
        assert ends == ([len(done.ids) - 1] if done.finish is FinishReason.STOP else [])
        ended += bool(ends)
    assert ended >= 8, "choose more stop ids"


@check
def ignoring_the_end_stops_neither_at_tokens_nor_at_strings(subject: Subject) -> None:
    first = free(subject, 1, 40)[0]
    stop = subject.decode(first.ids[3:6])
    sampling = Sampling(120, ignore_eos=True, stop=(stop,) if stop else ())
    asked = [ask(str(i), first.request.prompt_ids, sampling, seed=i) for i in range(8)]
    done = finish(subject, asked).values()
    assert all((len(c.ids), c.finish) == (120, FinishReason.LENGTH) for c in done)
    assert any(token in subject.stop_ids for c in done for token in c.ids)


@check
def a_stop_string_ends_with_the_token_that_completes_it(subject: Subject) -> None:
    """The greedy reply is the same with and without the stop string, up to where it is cut."""
    checked = 0
    for i in range(6):
        prompt = tokens(subject, 5 + i, 50 + i)
        long = finish(subject, [ask("free", prompt, Sampling(60, temperature=0.0, ignore_eos=True))])["free"].ids
        ends = next((place for place, token in enumerate(long) if token in subject.stop_ids), 60)
        text = subject.decode(long[:ends])
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        if len(stop) < 3 or "\ufffd" in stop:
            continue
        wanted = next(n for n in range(1, 61) if stop in subject.decode(long[:n]))
        done = finish(subject, [ask("cut", prompt, Sampling(60, temperature=0.0, stop=("never so", stop)))])["cut"]
        assert done.finish is FinishReason.STOP
        if done.ids[: wanted - 1] == long[: wanted - 1]:  # a near tie may be decided otherwise in another batch
            assert len(done.ids) == wanted
            checked += 1
    assert checked >= 2


@check
def the_logprobs_are_of_what_was_sampled_from(subject: Subject) -> None:
    for sampling in (
        Sampling(24, ignore_eos=True),
        Sampling(24, temperature=0.6, ignore_eos=True),
        Sampling(24, temperature=1.5, top_k=8, ignore_eos=True),
        Sampling(24, top_p=0.7, ignore_eos=True),
        Sampling(24, min_p=0.1, ignore_eos=True),
        Sampling(24, temperature=0.8, top_k=40, top_p=0.85, ignore_eos=True),
    ):
        asked = [ask(str(i), tokens(subject, 4 + 9 * i, i), sampling, seed=i) for i in range(6)]
        found, wanted = [], []
        for done in finish(subject, asked).values():
            found += done.logprobs
            wanted += expected(subject.reference, done.request.prompt_ids, done.ids, sampling)
        assert (gap := distance(found, wanted)) <= subject.tolerance, (sampling, gap)


@check
def greedy_takes_the_likeliest_and_tells_the_models_own_logprob(subject: Subject) -> None:
    sampling = Sampling(24, temperature=0.0, ignore_eos=True)
    asked = [ask(str(i), tokens(subject, 4 + 9 * i, i), sampling) for i in range(4)]
    for done in finish(subject, asked).values():
        rows = logits_of(subject.reference, (*done.request.prompt_ids, *done.ids))[
            len(done.request.prompt_ids) - 1 : -1
        ]
        logprobs_TV = rows.log_softmax(-1)
        chosen = [float(row[token]) for row, token in zip(logprobs_TV, done.ids, strict=True)]
        likeliest = logprobs_TV.amax(-1).tolist()
        assert np.mean(np.subtract(likeliest, chosen)) <= 2 * subject.tolerance
        assert distance(done.logprobs, chosen) <= subject.tolerance


@check
def samples_follow_the_distribution(subject: Subject) -> None:
    """Two thousand first tokens after one prompt, by chi square."""
    prompt, draws = tokens(subject, 9, 9), 2000
    asked = [ask(str(i), prompt, Sampling(1, ignore_eos=True), group="one", seed=i) for i in range(draws)]
    counts = np.bincount([c.ids[0] for c in finish(subject, asked).values()], minlength=subject.vocab)
    probs = logits_of(subject.reference, prompt)[-1].softmax(-1).numpy() * draws
    often = probs > 5
    assert often.sum() > 10
    chi_square = ((counts - probs)[often] ** 2 / probs[often]).sum()
    assert chi_square < often.sum() + 5 * math.sqrt(2 * often.sum()) + 8


@check
def a_seed_is_a_sample(subject: Subject) -> None:
    """The same requests in the same order give the same samples, and other seeds others."""
    prompt = tokens(subject, 12, 3)

    def sample(first: int) -> list[TokenIds]:
        asked = [ask(str(i), prompt, Sampling(20, ignore_eos=True), group="g", seed=first + i) for i in range(4)]
        done = finish(subject, asked)
        return [done[str(i)].ids for i in range(4)]

    once = sample(100)
    assert sample(100) == once
    assert len({*once, *sample(200)}) == 8


# --- scoring and weights --------------------------------------------------------------------------------------------
@check
def scores_are_those_of_a_full_forward_pass(subject: Subject) -> None:
    sequences = [tokens(subject, length, length) for length in (1, 2, 3, 16, 31, 33, 200)]
    scores = subject.engine.score(sequences)
    assert [len(row) for row in scores] == [len(ids) - 1 for ids in sequences]
    for ids, row in zip(sequences[1:], scores[1:], strict=True):
        logprobs_TV = logits_of(subject.reference, ids)[:-1].log_softmax(-1)
        wanted = [float(line[token]) for line, token in zip(logprobs_TV, ids[1:], strict=True)]
        assert distance(row, wanted) <= 2 * subject.tolerance


@check
def weights_are_what_was_loaded(subject: Subject) -> None:
    found = {name: tensor.cpu() for name, tensor in subject.engine.weights()}
    wanted = {name: tensor.cpu() for name, tensor in weights_of(subject.reference)}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@check
def loaded_weights_sample_and_nothing_is_remembered_of_the_old(subject: Subject) -> None:
    """The prompt is long enough for a cache of prefixes to have kept it."""
    prompt, sampling = tokens(subject, 200, 7), Sampling(12, temperature=0.0, ignore_eos=True)
    before = finish(subject, [ask("a", prompt, sampling)])["a"]
    try:
        subject.engine.load(weights_of(subject.other), 1)
        after = finish(subject, [ask("a", prompt, sampling, version=1)])["a"]
        gap = distance(after.logprobs, expected(subject.other, prompt, after.ids, sampling))
        assert gap <= subject.tolerance, gap
        (score,) = subject.engine.score([prompt])
        assert distance(score, expected(subject.other, prompt[:1], prompt[1:], Sampling(1))) <= 2 * subject.tolerance
    finally:
        subject.engine.load(weights_of(subject.reference), 0)
    again = finish(subject, [ask("a", prompt, sampling)])["a"]
    assert distance(again.logprobs, before.logprobs) <= subject.tolerance
    assert after.ids != before.ids


@check
def a_part_of_the_weights_may_be_loaded(subject: Subject) -> None:
    names = [name for name, _ in weights_of(subject.reference)][3:5]
    part = {name: tensor for name, tensor in weights_of(subject.other) if name in names}
    try:
        subject.engine.load(iter(part.items()), 4)
        found = dict(subject.engine.weights())
        for name, tensor in weights_of(subject.reference):
            assert torch.equal(found[name].cpu(), part.get(name, tensor).cpu()), name
    finally:
        subject.engine.load(iter([p for p in weights_of(subject.reference) if p[0] in names]), 0)


# --- refusals -------------------------------------------------------------------------------------------------------
@check
def another_version_is_refused_and_nothing_of_it_runs(subject: Subject) -> None:
    prompt = tokens(subject, 6, 1)
    with refuses(StaleWeightsError, match="needs version 1 of the weights, but the engine holds version 0"):
        subject.engine.submit([ask("a", prompt, Sampling(3)), ask("b", prompt, Sampling(3), version=1)])
    assert list(subject.engine.completed()) == []
    subject.engine.load(iter(()), 1)
    assert finish(subject, [ask("c", prompt, Sampling(3), version=1)])["c"].version == 1
    with refuses(StaleWeightsError):
        subject.engine.submit([ask("d", prompt, Sampling(3))])
    subject.engine.load(iter(()), 0)


@check
def requests_that_cannot_be_served_are_refused(subject: Subject) -> None:
    prompt = tokens(subject, 6, 1)
    for bad in (
        ask("empty", (), Sampling(3)),
        ask("no budget", prompt, Sampling(0)),
        ask("too long", prompt, Sampling(subject.context)),
        Request("prefix", prompt, "prefix", 0, Sampling(3), 0, prefix=6),
    ):
        with refuses(EngineError):
            subject.engine.submit([bad])
        assert list(subject.engine.completed()) == []


@check
def a_group_has_one_prompt(subject: Subject) -> None:
    with refuses(EngineError, match="group g have different prompts"):
        subject.engine.submit([ask("a", (5, 6), Sampling(2), group="g"), ask("b", (5, 7), Sampling(2), group="g")])
    assert list(subject.engine.completed()) == []


@check
def no_weights_arrive_while_requests_run(subject: Subject) -> None:
    asked = [ask(str(i), tokens(subject, 6, 1), Sampling(30, ignore_eos=True), group="g", seed=i) for i in range(3)]
    subject.engine.submit(asked)
    with refuses(EngineError, match="requests run"):
        subject.engine.load(iter(()), 1)
    assert len(list(subject.engine.completed())) == 3
    assert subject.engine.version == 0


@check
def requests_may_join_while_others_are_read(subject: Subject) -> None:
    subject.engine.submit([ask(str(i), tokens(subject, 5, i), Sampling(4 + i, ignore_eos=True)) for i in range(3)])
    found = []
    for done in subject.engine.completed():
        found.append(done.request.id)
        if len(found) == 1:
            subject.engine.submit([ask("late", tokens(subject, 5, 9), Sampling(5, ignore_eos=True))])
    assert sorted(found) == ["0", "1", "2", "late"]


# --- memory ---------------------------------------------------------------------------------------------------------
@check
def sleep_forgets_nothing_that_matters(subject: Subject) -> None:
    engine = subject.engine
    if not hasattr(engine, "sleep"):
        return
    prompt, sampling = tokens(subject, 100, 5), Sampling(16, temperature=0.0, ignore_eos=True)
    before = finish(subject, [ask("a", prompt, sampling)])["a"]
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        engine.wake()
        after = finish(subject, [ask("a", prompt, sampling)])["a"]
        assert after.ids == before.ids
        assert max(abs(a - b) for a, b in zip(after.logprobs, before.logprobs, strict=True)) <= subject.tolerance
        engine.sleep()
    weights_are_what_was_loaded(subject)


@check
def a_sleeping_engine_finds_room_among_what_torch_has_cached(subject: Subject) -> None:
    engine = subject.engine
    if not hasattr(engine, "sleep") or not torch.cuda.is_available():
        return
    prompt, sampling = tokens(subject, 101, 5), Sampling(4, temperature=0.0, ignore_eos=True)
    before = finish(subject, [ask("a", prompt, sampling)])["a"]
    engine.sleep()
    cached = torch.empty(torch.cuda.mem_get_info()[0] - 2**28, dtype=torch.uint8, device="cuda")
    del cached  # torch keeps its memory: what other processes and other allocators find is a quarter of a GiB
    assert finish(subject, [ask("a", prompt, sampling)])["a"].ids == before.ids
