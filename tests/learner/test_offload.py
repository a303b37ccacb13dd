"""Masters and moments in main memory: weights and state are those of a run without, bit for bit; what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.state import CheckpointState, ModelFiles, read_state, save_state
from lockstep.checkpoint.store import open_checkpoint
from lockstep.config.load import load
from lockstep.config.schema import AdamW, Muon, Optimizer, Recipe
from lockstep.errors import CheckpointError, ConfigError
from lockstep.learner import offload
from lockstep.learner.learner import TorchLearner
from lockstep.learner.optimizer import MasterOptimizer
from lockstep.run.state import recipe_hash
from tests.learner import test_sharded
from tests.learner.models import plain, twin
from tests.learner.test_learner import gradient_step, recipe, snapshot
from tests.learner.test_optimizer import loss_of

KINDS: dict[str, Optimizer] = {
    "adamw": AdamW(weight_decay=0.1, max_grad_norm=5.0),
    "8bit": AdamW(states="8bit", weight_decay=0.1),
    "muon": Muon(weight_decay=0.1, rest_lr_ratio=0.5),
}
SHAPES = {"embed_tokens.weight": (60, 24), "q_proj.weight": (12, 30), "norm.weight": (5,), "up_proj.weight": (40, 40)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensors are cut into several pieces, and the small ones share a batch."""
    monkeypatch.setattr(offload, "CHUNK", 512)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def moved(settings: Optimizer) -> Optimizer:
    return settings.model_copy(update={"offload": "cpu"})


def train(given: dict[str, nn.Parameter], optimizer: MasterOptimizer, steps: range) -> list[object]:
    results: list[object] = []
    for step in steps:
        (loss_of(given, step) * (math.nan if step == 2 else 1.0)).backward()
        results.append(repr(optimizer.step(0.1 / (1 + step))))
    return results


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_bits_are_those_of_a_run_without(kind: str, dtype: torch.dtype) -> None:
    """Five steps; one is skipped, some are clipped."""
    here, there = parameters(dtype), parameters(dtype)
    one, other = MasterOptimizer(here, KINDS[kind]), MasterOptimizer(there, moved(KINDS[kind]))
    assert train(here, one, range(5)) == train(there, other, range(5))
    assert same(dict(here), dict(there))
    state = other.tensors()
    assert same(one.tensors(), state)
    assert all(torch.any(tensor != 0) for tensor in state.values())


def test_pieces_cover_each_weight_once_and_keep_to_the_limit() -> None:
    for kind, settings in KINDS.items():
        host = MasterOptimizer(parameters(torch.bfloat16), moved(settings))._host
        assert host is not None
        batches = [batch for some in host._batches.values() for batch in some]
        sizes = [[math.prod(piece.shape) for piece in batch] for batch in batches]
        assert sum(map(sum, sizes)) == sum(math.prod(shape) for shape in SHAPES.values())
        for batch, size in zip(batches, sizes, strict=True):
            assert sum(size) <= 512 or (kind == "muon" and len(size) == 1 and batch[0].name == "up_proj.weight")
        assert max(map(len, sizes)) > 1
        assert any(piece.span.start for batch in batches for piece in batch)


def test_no_master_is_left_where_the_parameters_are() -> None:
    """What stands for a master there has a number's memory; gradients have all."""
    given = parameters(torch.bfloat16)
    optimizer = MasterOptimizer(given, moved(KINDS["adamw"]))
    loss_of(given, 0).backward()
    for name, master in optimizer._masters.items():
        assert master.untyped_storage().nbytes() == 4
        assert master.grad is not None
        assert master.grad.untyped_storage().nbytes() == 4 * given[name].numel()


# --- state ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("begins", ["with", "without"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_resumes_the_other_way(kind: str, begins: str, steps: int, tmp_path: Path) -> None:
    """Through the files of a real checkpoint."""
    first, second = KINDS[kind], moved(KINDS[kind])
    if begins == "with":
        first, second = second, first
    unbroken, reference = parameters(torch.bfloat16), parameters(torch.bfloat16)
    whole = MasterOptimizer(reference, KINDS[kind])
    train(reference, whole, range(5))
    before = MasterOptimizer(unbroken, first)
    train(unbroken, before, range(steps))
    weights = {name: p.detach() for name, p in unbroken.items()}
    save_state(tmp_path, CheckpointState(steps, weights, before.tensors(), {}), ModelFiles())
    found = read_state(open_checkpoint(tmp_path))
    fresh = {name: nn.Parameter(torch.zeros_like(p)) for name, p in unbroken.items()}
    after = MasterOptimizer(fresh, second)
    after.restore(found.optimizer)
    assert same(dict(sorted(weights.items())), dict(sorted(fresh.items())))
    train(fresh, after, range(steps, 5))
    assert same(dict(reference), dict(fresh))
    assert same(whole.tensors(), after.tensors())


def test_a_state_of_other_parameters_changes_nothing() -> None:
    given = parameters(torch.bfloat16)
    optimizer = MasterOptimizer(given, moved(KINDS["adamw"]))
    train(given, optimizer, range(2))
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    with pytest.raises(CheckpointError, match="missing, unknown or of another shape"):
        optimizer.restore({name: t for name, t in before.items() if name != "exp_avg.norm.weight"})
    assert same(optimizer.tensors(), before)


# --- learners -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_learner_trains_what_it_trains_without(kind: str) -> None:
    def trained(settings: Recipe) -> tuple[list[object], dict[str, Tensor], object]:
        learner = TorchLearner(
            twin(plain("llama-tied", dtype=torch.bfloat16 if kind == "bf16" else torch.float32)), settings
        )
        metrics: list[object] = [repr(sorted(gradient_step(learner, number).items())) for number in range(3)]
        return metrics, snapshot(learner), learner.fingerprint().combined

    settings = recipe(kind)
    here = trained(settings)
    there = trained(settings.model_copy(update={"optimizer": moved(settings.optimizer)}))
    assert here[0] == there[0]
    assert same(here[1], there[1])
    assert here[2] == there[2]


@pytest.mark.parametrize("name", ["full-bf16", "8bit", "muon"])
def test_owners_of_several_ranks_keep_their_part_in_main_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, weights, state = test_sharded.train(name, 0)
    settings = test_sharded.RECIPES[name]
    changed = settings.model_copy(update={"optimizer": moved(settings.optimizer)})
    monkeypatch.setitem(test_sharded.RECIPES, name, changed)
    for ranks in (0, 2):
        again, other, parts = test_sharded.train(name, ranks)
        assert list(map(repr, again)) == list(map(repr, metrics))
        assert test_sharded.same(other, weights)
        assert test_sharded.same(parts, state)


# --- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["device=cpu"], "device=cpu has none"),
        (["adapter.kind=lora"], "of lora the state is small"),
        (["optimizer={kind: python, path: own.py:Own, offload: cpu}"], "optimizer.kind=python may need all"),
    ],
)
def test_what_offload_would_not_help_is_refused_with_the_reason(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["task=reasoning_gym", "optimizer.offload=cpu", *words])
    (mistake,) = caught.value.mistakes
    assert reason in mistake


def test_it_is_not_in_what_a_checkpoint_says_of_its_recipe() -> None:
    """A resume may turn it on or off."""
    one = load(["task=reasoning_gym"])
    assert recipe_hash(one) == recipe_hash(load(["task=reasoning_gym", "optimizer.offload=cpu"]))
    assert recipe_hash(one) != recipe_hash(load(["task=reasoning_gym", "optimizer.states=8bit"]))


# --- on a GPU -------------------------------------------------------------------------------------------------------
def large(device: str) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"embed_tokens.weight": (40000, 1024), "up_proj.weight": (4096, 1024), "norm.weight": (1024,)}
    return {n: nn.Parameter(torch.randn(*s, device=device, dtype=torch.bfloat16)) for n, s in shapes.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("chunk", [2**20, 2**24])
def test_the_bits_of_a_gpu_too(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK", chunk)
    here, there = large("cuda"), large("cuda")
    one, other = MasterOptimizer(here, KINDS[kind]), MasterOptimizer(there, moved(KINDS[kind]))
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(4):
        for name, parameter in here.items():
            grad = torch.randn(parameter.shape, generator=generator, device="cuda").bfloat16()
            for given in (here, there):
                (given[name] * grad).sum().backward()
        assert repr(one.step(1e-3)) == repr(other.step(1e-3)), step
    assert same(dict(here), dict(there))
    state = other.tensors()
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor.cpu(), state[name].cpu()), name
    assert state["master.up_proj.weight"].is_pinned()
    saved = {name: tensor.clone() for name, tensor in state.items()}
    resumed = MasterOptimizer(large("cuda"), moved(KINDS[kind]))
    resumed.restore(saved)
    assert all(torch.equal(tensor.cpu(), saved[name].cpu()) for name, tensor in resumed.tensors().items())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_memory_of_a_gpu_is_what_the_plan_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes a parameter less after a step under AdamW, and in it the two buffers more."""
    monkeypatch.setattr(offload, "CHUNK", 2**22)

    def measured(settings: Optimizer) -> tuple[int, int]:
        given = large("cuda")
        optimizer = MasterOptimizer(given, settings)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            for parameter in given.values():
                parameter.sum().backward()
            optimizer.step(1e-3)
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    kept, peak = measured(KINDS[kind])
    less, low = measured(moved(KINDS[kind]))
    state = MasterOptimizer(large("cuda"), moved(KINDS[kind]))._host
    assert state is not None
    held = sum(tensor.nbytes for kept in state._kept.values() for tensor in kept.values())
    assert kept - less == pytest.approx(held, rel=0.01)
    per_weight = held / sum(parameter.numel() for parameter in large("cuda").values())
    assert peak - low >= held - 2 * max(2**22 * per_weight, 8 * 4096 * 1024) - 2**25
