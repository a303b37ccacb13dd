"""Muon against torch's own and by hand, a user's optimizer, what each keeps, and schedules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.load import load, load_mapping
from lockstep.config.schema import AdamW, Muon, Optimizer, PythonOptimizer
from lockstep.errors import CheckpointError, ConfigError, LearnerError
from lockstep.learner.optimizer import MasterOptimizer
from lockstep.learner.optimizers import is_hidden_matrix
from lockstep.learner.schedule import learning_rate
from lockstep.plan.memory import optimizer_terms
from lockstep.plan.memory_inputs import state_bytes
from tests.learner.test_optimizer import loss_of

SHAPES = {"embed_tokens.weight": (6, 4), "q_proj.weight": (4, 3), "norm.weight": (5,), "up_proj.weight": (3, 8)}
MATRICES = ("q_proj.weight", "up_proj.weight")


def parameters(
    dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


# --- Muon -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(scale: Any):
    settings = Muon(weight_decay=0.1, max_grad_norm=1e9, scale=scale, rest_lr_ratio=0.5, betas=(0.8, 0.9))
    ours, theirs = parameters(), parameters()
    optimizer = MasterOptimizer(ours, settings)
    muon = torch.optim.Muon([theirs[n] for n in MATRICES], weight_decay=0.1, adjust_lr_fn=scale)
    groups = [{"params": [theirs["embed_tokens.weight"]]}, {"params": [theirs["norm.weight"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, weight_decay=0.1, betas=(0.8, 0.9), foreach=False)
    for step in range(5):
        rate = 0.02 / (1 + step)
        loss_of(ours, step).backward()
        optimizer.step(rate)
        loss_of(theirs, step).backward()
        for reference, factor in ((muon, 1.0), (adamw, 0.5)):
            for group in reference.param_groups:
                group["lr"] = rate * factor
            reference.step()
            reference.zero_grad()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    assert (
        optimizer.note
        == "optimizer: Muon for 2 tensors (3.6e-05e6 parameters), AdamW for 2 tensors (2.9e-05e6 parameters)"
    )


def test_a_step_of_muon_by_hand():
    """The gradient's singular values become about 1: with momentum 0 a step is lr · 0.2 · √max(A, B) · U V^T."""
    gradient = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = MasterOptimizer({"q_proj.weight": weight}, Muon(momentum=0.0, max_grad_norm=1e9))
    (weight * gradient).sum().backward()
    optimizer.step(0.1)
    moved = -weight.detach() / (0.1 * 0.2 * math.sqrt(3))
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    # Newton-Schulz with these coefficients ends between 0.7 and 1.2, by design (torch.optim.Muon)
    assert torch.allclose(moved, expected, atol=0.35), moved
    assert moved[0, 1].abs() < 1e-6


def test_what_muon_is_meant_for():
    matrix, row, stack = torch.zeros(4, 4), torch.zeros(1, 4), torch.zeros(2, 4, 4)
    assert is_hidden_matrix("layers.0.q_proj.weight", matrix)
    assert is_hidden_matrix("layers.0.q_proj.lora_A", matrix)
    for name, tensor in (
        ("embed_tokens.weight", matrix),
        ("lm_head.weight", matrix),
        ("head.weight", row),
        ("experts", stack),
    ):
        assert not is_hidden_matrix(name, tensor), name
    with pytest.raises(LearnerError, match="the run trains no such matrix"):
        MasterOptimizer(parameters(shapes={"norm": (3,)}), Muon())


# --- what all of them have ------------------------------------------------------------------------------------------
OWN = """
import torch


class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr, decay: float = 0.5, steps: int = 2, name: str = "", weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "decay": decay, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["rate"] = 1 / state["count"]
                state["sum"] = p.grad.clone() if "sum" not in state else state["sum"] * group["decay"] + p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p -= group["lr"] * state["rate"] * state["sum"]


class NoDecay(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        raise RuntimeError("no step today")


class Warm(torch.optim.Optimizer):
    def __init__(self, params, lr, warm: int = 5, betas: tuple = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "warm": warm, "k": 0, "total": None, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            norm = sum(p.grad.square().sum() for p in group["params"]).sqrt()
            group["total"] = norm if group["total"] is None else group["total"] + norm
            for p in group["params"]:
                p.sub_(p.grad / group["total"], alpha=group["lr"] * min(1.0, group["k"] / group["warm"]))


class OddGroup(Warm):
    def step(self):
        super().step()
        self.param_groups[0]["betas"] = (0.5, 0.5)


class Odd(Mine):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = ["first"]


class Decays(torch.optim.AdamW):
    def __init__(self, params, lr, weight_decay: float = 0.01):
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Hinted(torch.optim.SGD):
    def __init__(self, params: "Iterable", lr: "float" = 0.1, momentum: "float" = 0.0, start: "torch.Tensor | int" = 0):
        super().__init__(params, lr=lr, momentum=momentum)


def function(params, lr):
    return None
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def kinds(own: Path) -> dict[str, Optimizer]:
    return {
        "adamw": AdamW(weight_decay=0.1),
        "8bit": AdamW(states="8bit"),
        "muon": Muon(weight_decay=0.1),
        "python": PythonOptimizer(path=f"{own}:Mine", settings={"decay": 0.25}, weight_decay=0.1),
        "group": PythonOptimizer(path=f"{own}:Warm", settings={"warm": 5}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "8bit", "muon", "python", "group"])
def test_a_restored_optimizer_continues_bit_by_bit(own: Path, kind: str, dtype: torch.dtype):
    settings = kinds(own)[kind]

    def train(given: dict[str, nn.Parameter], optimizer: MasterOptimizer, steps: range) -> None:
        for step in steps:
            loss_of(given, step).backward()
            assert not optimizer.step(0.01).skipped

    unbroken = parameters(dtype)
    optimizer = MasterOptimizer(unbroken, settings)
    train(unbroken, optimizer, range(3))
    saved = {name: t.clone() for name, t in optimizer.tensors().items()}
    weights = {name: p.detach().clone() for name, p in unbroken.items()}
    train(unbroken, optimizer, range(3, 6))
    fresh = parameters(dtype)
    with torch.no_grad():
        for name, parameter in fresh.items():
            parameter.copy_(weights[name])
    resumed = MasterOptimizer(fresh, settings)
    resumed.restore(saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in resumed.tensors().items())
    train(fresh, resumed, range(3, 6))
    ours, theirs = optimizer.tensors() | dict(unbroken), resumed.tensors() | dict(fresh)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ("master.norm.weight" in saved) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_a_state_of_another_optimizer_is_refused(own: Path, damage: str):
    given = parameters()
    optimizer = MasterOptimizer(given, Muon())
    loss_of(given, 0).backward()
    optimizer.step(0.1)
    state = dict(optimizer.tensors())
    if damage == "missing":
        del state["momentum_buffer.q_proj.weight"]
    elif damage == "unknown":
        state["exp_avg.q_proj.weight"] = torch.zeros(4, 3)
    else:
        state["momentum_buffer.q_proj.weight"] = torch.zeros(3, 4)
    with pytest.raises(CheckpointError, match="q_proj"):
        MasterOptimizer(parameters(), Muon()).restore(state)
    with pytest.raises(CheckpointError, match="missing, unknown"):
        MasterOptimizer(parameters(), AdamW()).restore(optimizer.tensors())


# --- the user's own -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("Mine", {"decy": 0.1}, "decy: no such setting; did you mean decay"),
        ("Mine", {"decay": "much"}, "decay = 'much': Input should be a valid number"),
        ("Mine", {"steps": 1.5}, "steps = 1.5: Input should be a valid integer"),
        ("Missing", {}, "has no Missing"),
        ("function", {}, "not a subclass of torch.optim.Optimizer"),
    ],
)
def test_a_class_or_setting_that_does_not_fit_is_refused(own: Path, name: str, settings: dict[str, Any], match: str):
    with pytest.raises(LearnerError, match=match):
        MasterOptimizer(parameters(), PythonOptimizer(path=f"{own}:{name}", settings=settings))


def test_hints_that_cannot_be_read_refuse_nothing(own: Path):
    """Iterable is not imported there, as with `if TYPE_CHECKING`, and pydantic knows no tensors; momentum is checked still."""
    settings = {"momentum": "0.5", "start": 3}
    (inner,) = MasterOptimizer(parameters(), PythonOptimizer(path=f"{own}:Hinted", settings=settings))._inner
    assert inner.optimizer.param_groups[0]["momentum"] == 0.5
    with pytest.raises(LearnerError, match="momentum = 'much': Input should be a valid number"):
        MasterOptimizer(parameters(), PythonOptimizer(path=f"{own}:Hinted", settings={"momentum": "much"}))


@pytest.mark.parametrize(
    ("setting", "options", "decays"), [(0.0, {}, {0.0}), (0.5, {}, {0.5, 0.0}), (0.0, {"weight_decay": 0.25}, {0.25})]
)
def test_the_decay_is_the_recipes_not_the_default_of_the_class(
    own: Path, setting: float, options: dict[str, Any], decays: set[float]
):
    settings = PythonOptimizer(path=f"{own}:Decays", settings=options, weight_decay=setting)
    (inner,) = MasterOptimizer(parameters(), settings)._inner
    assert {group["weight_decay"] for group in inner.optimizer.param_groups} == decays


def test_two_decays_are_refused():
    mine = ["optimizer.kind=python", "optimizer.path=a.py:B", "optimizer.settings.weight_decay=0.25"]
    assert load(mine).optimizer.weight_decay == 0
    with pytest.raises(ConfigError, match=r"optimizer: weight_decay and settings\.weight_decay both set the decay"):
        load([*mine, "optimizer.weight_decay=0.5"])


def test_what_fails_says_where(own: Path):
    given = parameters()
    optimizer = MasterOptimizer(given, PythonOptimizer(path=f"{own}:NoDecay"))
    loss_of(given, 0).backward()
    with pytest.raises(LearnerError, match=r"the optimizer's step fails: RuntimeError: no step today .*own.py:\d+"):
        optimizer.step(0.1)
    with pytest.raises(LearnerError, match=r"weight_decay=0\.5 would have no effect"):
        MasterOptimizer(parameters(), PythonOptimizer(path=f"{own}:NoDecay", weight_decay=0.5))
    odd = MasterOptimizer(given, PythonOptimizer(path=f"{own}:Odd"))
    loss_of(given, 0).backward()
    odd.step(0.1)
    with pytest.raises(CheckpointError, match="the optimizer's state 'history' is a list"):
        odd.tensors()
    odd = MasterOptimizer(given, PythonOptimizer(path=f"{own}:OddGroup"))
    loss_of(given, 0).backward()
    odd.step(0.1)
    with pytest.raises(CheckpointError, match="the optimizer's state 'group:betas' is a tuple"):
        odd.tensors()


# --- settings -------------------------------------------------------------------------------------------------------
def test_a_recipe_without_a_kind_has_adamw():
    assert load(["optimizer.lr=1e-3", "optimizer.betas=[0.8, 0.9]"]).optimizer == AdamW(lr=1e-3, betas=(0.8, 0.9))
    assert load_mapping({"optimizer": {"lr": 0.5}}).optimizer == AdamW(lr=0.5)
    assert load(["optimizer={kind: muon, lr: 1e-3}"]).optimizer == Muon(lr=1e-3)
    with pytest.raises(ConfigError, match="momentum"):
        load(["optimizer={kind: adamw, momentum: 0.9}"])
    with pytest.raises(ConfigError, match="decay_share applies to schedule=wsd only"):
        load(["optimizer.decay_share=0.5"])
    with pytest.raises(ConfigError, match="min_lr_ratio has no effect on a constant schedule"):
        load(["optimizer.min_lr_ratio=0.5"])


@pytest.mark.parametrize(
    ("words", "rate"),
    [([], 1e-6), (["adapter.kind=lora"], 2e-5), (["loop=sft"], 1e-5), (["loop=sft", "adapter.kind=lora"], 1e-4),
     (["loop=sft", "optimizer.lr=3e-3"], 3e-3)],
)  # fmt: skip
def test_the_default_rate_depends_on_loop_and_adapter(words: list[str], rate: float):
    assert load([*words, *(["sft={data: rows.jsonl}"] if "loop=sft" in words else [])]).lr == rate


def test_wsd_by_hand():
    """Of ten steps two warm up and the last four fall."""
    settings = AdamW(schedule="wsd", warmup_steps=2, decay_share=0.4, min_lr_ratio=0.1)
    found = [learning_rate(settings, 1.0, step, 10) for step in range(11)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])


@pytest.mark.parametrize("steps", [2, 3, 4, 7, 8])
def test_wsd_falls_in_short_runs_too(steps: int):
    """A fifth of two to seven steps is none or one, and the first step of the decay still has the peak."""
    assert [learning_rate(AdamW(schedule="wsd"), 1.0, step, steps) for step in range(steps)][-2:] == [1, 0.5]


# --- memory ---------------------------------------------------------------------------------------------------------
def test_the_plan_knows_the_bytes_that_are_kept(tiny_model_dir: Path, own: Path):
    """Counted on the tensors of a real optimizer over a real model."""
    from transformers import AutoModelForCausalLM

    from lockstep.plan.memory_inputs import memory_inputs_of
    from lockstep.plan.model_shape import read_shape

    shape = read_shape(tiny_model_dir)
    for words in (["optimizer.kind=adamw"], ["optimizer.states=8bit"], ["optimizer.kind=muon"]):
        recipe = load([*words, f"model={{path: {tiny_model_dir}, dtype: bf16}}"])
        model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
        optimizer = MasterOptimizer(dict(model.named_parameters()), recipe.optimizer)
        model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        optimizer.step(1e-3)
        kept = sum(t.nbytes for name, t in optimizer.tensors().items() if not name.startswith(("master.", "step.")))
        predicted = state_bytes(recipe, shape) * shape.parameters
        assert predicted == pytest.approx(kept, rel=0.01), words
    inputs = memory_inputs_of(load(["optimizer.kind=muon"]), shape, "cuda", 1e9, prompt_tokens=8, passes=False)
    assert [term.name for term in optimizer_terms(inputs)] == ["gradient sums", "moments at work"]
