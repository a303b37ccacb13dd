"""Learners that train together: weights, metrics and optimizer state are those of one learner, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import AdamW, Lora, Muon, PythonOptimizer, Recipe, Update
from lockstep.errors import CheckpointError
from lockstep.learner.adapter_files import Base
from lockstep.learner.adapters import attach
from lockstep.learner.learner import TorchLearner
from lockstep.learner.packing import as_sequence, microbatches
from lockstep.learner.protocol import Share, update_metrics
from lockstep.learner.ranks import Ranks, assign_owners, deal
from lockstep.learner.sharded import ShardedOptimizer, build_optimizer
from lockstep.models.weights import named_weights
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import Batch, Loss, Metrics, TrainSequence
from tests.learner.batches import make_batch
from tests.learner.models import plain, tokens, twin
from tests.learner.thread_ranks import together

STEPS = 3
ADAM = AdamW(lr=1e-2, max_grad_norm=0.5)
RECIPES = {
    "full-fp32": Recipe(optimizer=ADAM, update=Update(tokens_per_microbatch=24)),
    "full-bf16": Recipe(optimizer=ADAM, update=Update(tokens_per_microbatch=24)),
    "lora-bf16": Recipe(optimizer=ADAM, update=Update(tokens_per_microbatch=24), adapter=Lora(rank=4)),
    "8bit": Recipe(optimizer=AdamW(lr=1e-2, states="8bit"), update=Update(tokens_per_microbatch=24)),
    "muon": Recipe(optimizer=Muon(lr=1e-2), update=Update(tokens_per_microbatch=24)),
}


BUILDING = threading.Lock()
"""Random weights are drawn with torch's one generator."""


def model_of(name: str, family: str = "llama-tied") -> nn.Module:
    with BUILDING:
        return build_model(name, family)


def build_model(name: str, family: str) -> nn.Module:
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    model = twin(plain(family, dtype=dtype))
    return attach(model, RECIPES[name].adapter, 0, Base.of(model, "tiny")) if name.startswith("lora") else model


def batches() -> list[Batch]:
    """Batches of one to eight micro-batches; the last has a single one."""
    whole = make_batch(old=False, ref=False)
    return [whole, replace(whole, sequences=whole.sequences[2:]), replace(whole, sequences=whole.sequences[:1])]


Trained = tuple[list[Metrics], dict[str, Tensor], dict[str, Tensor]]


def train(name: str, ranks: int, family: str = "llama-tied") -> Trained:
    """Metrics of three updates, the weights, and the optimizer's state of all ranks together; 0 ranks is today's learner."""
    recipe, loss = RECIPES[name], build_objective(RECIPES[name]).loss

    def body(own: Ranks | None) -> Trained:
        learner = TorchLearner(model_of(name, family), recipe, ranks=own)
        shares = [
            by_rounds(learner, batch, loss, own) if own else learner.update_share(batch, loss) for batch in batches()
        ]
        weights = {name: tensor.clone() for name, tensor in named_weights(learner.model)}
        return shares, weights, {key: tensor.clone() for key, tensor in learner.optimizer.tensors().items()}

    found = together(ranks, body) if ranks else [body(None)]
    for _, weights, _ in found:
        assert same(weights, found[0][1])
    state: dict[str, Tensor] = {}
    for _, _, part in found:
        assert not state.keys() & part.keys()
        state |= part
    return [update_metrics(shares) for shares in zip(*(one[0] for one in found), strict=True)], found[0][1], state


def by_rounds(learner: TorchLearner, batch: Batch, loss: Loss, ranks: Ranks) -> Share:
    """Train as a driver has it done: round by round, with the sequences of the rank's own micro-batch alone."""
    facts, none = learner.describe(), TrainSequence((), (), (), (), (), 0.0, 0)
    share, sequences = facts.share_prompts, batch.sequences
    chunks = microbatches(sequences, facts.microbatch_tokens, share_prompts=share, prefix=batch.prefix)
    learner.begin_update()
    for number, dealt in enumerate(deal(chunks, ranks.size)):
        own = dealt[ranks.rank] if ranks.rank < len(dealt) else []
        part = replace(batch, sequences=tuple(one if i in own else none for i, one in enumerate(sequences)))
        learner.train_round(part, loss, own, number * ranks.size + ranks.rank, len(dealt))
    return learner.finish_update()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sampled("full-fp32-3", "full-bf16-2", "lora-bf16-4", "muon-2", "8bit-3")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(RECIPES))
def test_any_number_of_ranks_trains_what_one_learner_trains(name: str, ranks: int) -> None:
    metrics, weights, state = train(name, 0)
    assert any(row["grad/clipped"] for row in metrics)
    assert metrics[0]["batch/microbatches"] > 4  # more than a round
    again, other, parts = train(name, ranks)
    assert [list(map(repr, row.items())) for row in again] == [list(map(repr, row.items())) for row in metrics]
    assert same(other, weights)
    assert same(parts, state)


def test_a_mixture_of_experts_trains_alike_on_several_ranks() -> None:
    """Experts that a micro-batch did not reach have no gradient of it."""
    metrics, weights, _ = train("full-fp32", 0, "qwen3-moe")
    again, other, _ = train("full-fp32", 3, "qwen3-moe")
    assert metrics == again
    assert same(other, weights)


def test_owners_know_the_new_weights_before_the_others_get_them() -> None:
    """Their fingerprints, made before the weights are sent, are those that every rank has afterwards."""
    recipe, loss = RECIPES["full-bf16"], build_objective(RECIPES["full-bf16"]).loss

    def body(ranks: Ranks) -> tuple[dict[str, object], dict[str, object]]:
        learner = TorchLearner(model_of("full-bf16"), recipe, ranks=ranks)
        learner.update_share(batches()[0], loss)
        assert isinstance(learner.optimizer, ShardedOptimizer)
        return dict(learner.optimizer.truth), dict(fingerprint(learner.weights()).tensors)

    found = together(3, body)
    truth = {name: value for own, _ in found for name, value in own.items()}
    assert truth == found[0][1]
    assert sum(len(own) for own, _ in found) == len(truth)


def test_all_ranks_skip_a_step_whose_gradient_is_not_finite_on_one() -> None:
    recipe, loss = RECIPES["full-fp32"], build_objective(RECIPES["full-fp32"]).loss
    batch = make_batch(old=False, ref=False)
    broken = replace(batch.sequences[-1], advantages=(float("inf"),) * len(batch.sequences[-1].ids))
    batch = replace(batch, sequences=(*batch.sequences[:-1], broken))

    def body(ranks: Ranks) -> bool:
        learner = TorchLearner(model_of("full-fp32"), recipe, ranks=ranks)
        before = fingerprint(learner.weights()).combined
        share = learner.update_share(batch, loss)
        return share.skipped == 1 and fingerprint(learner.weights()).combined == before

    assert together(2, body) == [True, True]


def test_log_probabilities_are_shared_out_and_equal_those_of_one_learner() -> None:
    recipe = RECIPES["full-fp32"]
    sequences = make_batch().sequences
    whole = TorchLearner(model_of("full-fp32"), recipe).response_logprobs(sequences, 0.9)

    def body(ranks: Ranks) -> list[tuple[float, ...]]:
        return TorchLearner(model_of("full-fp32"), recipe, ranks=ranks).response_logprobs(sequences, 0.9)

    rows = together(3, body)
    for place, row in enumerate(whole):
        assert [found[place] for found in rows if found[place]] == [row]
    assert all(any(row) for row in rows)


def test_state_saved_by_four_ranks_is_taken_over_by_two() -> None:
    recipe, loss, (first, second, _) = RECIPES["full-bf16"], build_objective(RECIPES["full-bf16"]).loss, batches()

    def begin(ranks: Ranks | None) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, int]]:
        learner = TorchLearner(model_of("full-bf16"), recipe, ranks=ranks)
        learner.update_share(first, loss)
        saved = learner.save()
        clones = [{key: tensor.clone() for key, tensor in kept.items()} for kept in (saved.weights, saved.optimizer)]
        return clones[0], clones[1], saved.counters

    parts = together(4, begin)
    weights, counters = parts[0][0], parts[0][2]
    state = {key: tensor for _, part, _ in parts for key, tensor in part.items()}
    assert same(state, begin(None)[1])

    def go_on(ranks: Ranks | None) -> dict[str, Tensor]:
        model = model_of("full-bf16")
        with torch.no_grad():
            for name, tensor in named_weights(model):
                tensor.copy_(weights[name])
        learner = TorchLearner(model, recipe, ranks=ranks)
        learner.restore(counters, state)
        learner.update_share(second, loss)
        return dict(named_weights(learner.model))

    alone = go_on(None)
    assert all(same(found, alone) for found in together(2, go_on))
    with pytest.raises(CheckpointError):
        together(2, lambda ranks: TorchLearner(model_of("full-bf16"), recipe, ranks=ranks).restore(counters, {}))


OWN = """
import torch

class Mine(torch.optim.SGD):
    pass
"""


def test_a_rank_that_owns_nothing_needs_no_optimizer_of_the_users(tmp_path: Path) -> None:
    """As with a critic's head alone, two tensors, on three ranks."""
    (tmp_path / "own.py").write_text(OWN)
    settings = PythonOptimizer(path=f"{tmp_path}/own.py:Mine", weight_decay=0.1)

    def body(ranks: Ranks | None) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
        weights = {"weight": nn.Parameter(torch.ones(4)), "bias": nn.Parameter(torch.ones(()))}
        optimizer = build_optimizer(weights, settings, ranks)
        (weights["weight"] * torch.arange(4.0)).sum().backward()
        optimizer.exchange(1)
        return {name: one.detach() for name, one in weights.items()}, optimizer.step(0.1).norm, optimizer.tensors()

    weights, norm, _ = body(None)
    for rank, (own, its, state) in enumerate(together(3, body)):
        assert same(own, weights)
        assert its == norm
        assert rank < 2 or not state


# --- who does what --------------------------------------------------------------------------------------------------
def test_the_largest_tensors_are_spread_over_the_ranks() -> None:
    sizes = {"embed": 90, **{f"layer{i}": 30 for i in range(6)}, "norm": 1}
    owner = assign_owners(sizes, 3)
    owned = [sum(size for name, size in sizes.items() if owner[name] == rank) for rank in range(3)]
    assert owned == [91, 90, 90]
    assert list(owner) == list(sizes)
    assert set(assign_owners({"one": 4}, 4).values()) == {0}


@given(
    st.lists(st.floats(3.5, 6.5), min_size=96, max_size=512),
    st.sampled_from([8, 16]),
)
def test_sixteen_ranks_get_each_sequence_once_and_about_the_same_tokens(logs: list[float], ranks: int) -> None:
    """Groups of eight replies of 33 to 665 tokens, as they come, in micro-batches of 16384 tokens."""
    lengths = [int(2.718281828**log) for log in logs] * 8
    sequences = [
        replace(as_sequence(tokens(1 + length, 0), 0), group=place // 8) for place, length in enumerate(lengths)
    ]
    rounds = deal(microbatches(sequences, 16384, share_prompts=True), ranks)
    dealt = [index for chunks in rounds for chunk in chunks for index in chunk]
    assert sorted(dealt) == list(range(len(sequences)))
    assert all(len(chunks) == ranks for chunks in rounds[:-1])
    for chunks in rounds[:-1]:  # the last has what is left
        loads = [sum(lengths[index] for index in chunk) for chunk in chunks]
        assert max(loads) <= 1.05 * sum(loads) / len(loads)
