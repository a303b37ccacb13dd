"""The optimizers that act on fp32 master weights: torch's AdamW and Muon, 8-bit AdamW, or a user's class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, assert_never, get_type_hints

import torch
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from torch import Tensor, nn

from lockstep.config.schema import AdamW, Muon, Optimizer, PythonOptimizer
from lockstep.errors import LearnerError
from lockstep.learner.adamw8bit import AdamW8bit
from lockstep.text import did_you_mean
from lockstep.user_code import describe, load_object

ADAMW_KEYS = {
    "fp32": ("step", "exp_avg", "exp_avg_sq"),
    "8bit": ("step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"),
}
"""State that AdamW keeps per weight, by its setting `states`."""
MUON_KEYS = ("momentum_buffer",)
NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of matrices that are tables of tokens or positions, which Muon is not meant for."""
PLACEHOLDER_RATE = 1e-3
"""Learning rate until the first step sets the schedule's."""


class Steps(Protocol):
    """The part of torch.optim.Optimizer that MasterOptimizer needs."""

    param_groups: list[dict[str, Any]]
    state: Any

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = ...) -> None: ...


@dataclass(frozen=True, slots=True)
class Inner:
    """An optimizer over some of the masters."""

    optimizer: Steps
    names: frozenset[str]
    """Names of its masters."""
    keys: tuple[str, ...] | None
    """Keys of its state per master; None is known only after a step."""
    rate: float = 1.0
    """Its learning rate as a multiple of the schedule's."""
    path: str = ""
    """The user's class, for messages."""
    by_weight: bool = True
    """The step of a weight reads no other weight of its tensor (of its block, in 8 bits)."""

    def step(self, lr: float) -> None:
        """Make a step. Raises LearnerError for any error in a user's class."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * lr
        if not self.path:
            self.optimizer.step()
            return
        try:
            self.optimizer.step()
        except Exception as error:
            file = Path(self.path.rpartition(":")[0]).expanduser()
            what = f"the optimizer's step fails: {describe(error, file)}"
            raise LearnerError(what, where=self.path, fix="correct the class") from error


def build_inner(
    settings: Optimizer, masters: Mapping[str, nn.Parameter], whole: Mapping[str, nn.Parameter] | None = None
) -> tuple[Inner, ...]:
    """Return the optimizers of a recipe over these masters. Raises LearnerError for a class that cannot be used.

    `whole`: all parameters of the run, if the masters are one rank's.
    """
    match settings:
        case AdamW():
            return (_adamw(settings, masters),)
        case Muon():
            return _muon(settings, masters, whole or masters)
        case PythonOptimizer():
            # torch builds no optimizer of nothing, which is what a rank has if there are more ranks than tensors
            return (_python(settings, masters),) if masters else ()
        case _:
            assert_never(settings)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon is meant for the parameter: a matrix between hidden states, not a table of tokens or a single row."""
    return parameter.dim() == 2 and min(parameter.shape) > 1 and not any(word in name for word in NOT_HIDDEN)


def describe_inner(inner: Sequence[Inner], masters: Mapping[str, nn.Parameter]) -> str:
    """Return which optimizer has which parameters, if there are several or one is the user's."""

    def share(one: Inner) -> str:
        count = sum(masters[name].numel() for name in one.names)
        kind = one.path or type(one.optimizer).__name__
        return f"{kind} for {len(one.names)} tensors ({count / 1e6:.3g}e6 parameters)"

    own = any(one.path for one in inner)
    return f"optimizer: {', '.join(map(share, inner))}" if own or len(inner) > 1 else ""


def _groups(masters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups in which matrices decay and vectors do not."""
    decayed = [m for m in masters.values() if m.dim() >= 2]
    others = [m for m in masters.values() if m.dim() < 2]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _adamw(settings: AdamW, masters: Mapping[str, nn.Parameter]) -> Inner:
    groups = _groups(masters, settings.weight_decay)
    optimizer: Steps
    if settings.states == "8bit":
        optimizer = AdamW8bit(groups, betas=settings.betas, eps=settings.eps)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    return Inner(optimizer, frozenset(masters), ADAMW_KEYS[settings.states])


def _muon(settings: Muon, masters: Mapping[str, nn.Parameter], whole: Mapping[str, nn.Parameter]) -> tuple[Inner, ...]:
    """Build Muon, and AdamW for the rest. Raises LearnerError if there is no matrix for Muon, except for a value head alone."""
    if not any(is_hidden_matrix(name, p) or name.startswith("value_head.") for name, p in whole.items()):
        raise LearnerError(
            "Muon is only for matrices between hidden states, but the run trains no such matrix",
            where="optimizer.kind",
            fix="set optimizer.kind=adamw",
        )
    matrices = {name: m for name, m in masters.items() if is_hidden_matrix(name, m)}
    rest = {name: m for name, m in masters.items() if name not in matrices}
    found = []
    if matrices:
        muon = torch.optim.Muon(
            matrices.values(),
            lr=0.0,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            ns_steps=settings.iterations,
            adjust_lr_fn=settings.scale,
        )
        found.append(Inner(muon, frozenset(matrices), MUON_KEYS, by_weight=False))
    if rest:
        groups = _groups(rest, settings.weight_decay)
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        found.append(Inner(adamw, frozenset(rest), ADAMW_KEYS["fp32"], settings.rest_lr_ratio))
    return tuple(found)


# --- the user's own -------------------------------------------------------------------------------------------------
def _python(settings: PythonOptimizer, masters: Mapping[str, nn.Parameter]) -> Inner:
    found = load_object(settings.path, LearnerError)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        what = f"this is {found!r:.80}, not a subclass of torch.optim.Optimizer"
        raise LearnerError(
            what, where=f"optimizer.path={settings.path}", fix="give a subclass of torch.optim.Optimizer"
        )
    given = checked_settings(found, settings)
    groups = _groups(masters, settings.weight_decay)
    takes = "weight_decay" in inspect.signature(found).parameters and "weight_decay" not in given
    if not (settings.weight_decay or takes):  # a decay of 0 is given too: the class may have another default
        groups = [{"params": group["params"]} for group in groups]
    make: Callable[..., torch.optim.Optimizer] = found
    try:
        optimizer = make([group for group in groups if group["params"]], lr=PLACEHOLDER_RATE, **given)
    except Exception as error:
        file = Path(settings.path.rpartition(":")[0]).expanduser()
        what = f"the optimizer cannot be built: {describe(error, file)}"
        raise LearnerError(
            what, where=settings.path, fix="change the class so that the call Class(groups, lr=…, **settings) works"
        ) from error
    if settings.weight_decay and "weight_decay" not in optimizer.defaults:
        what = f"optimizer.weight_decay={settings.weight_decay} would have no effect: the class has no weight_decay"
        raise LearnerError(
            what,
            where=settings.path,
            fix="leave optimizer.weight_decay out, or add the parameter weight_decay to the class",
        )
    return Inner(optimizer, frozenset(masters), None, path=settings.path)


def checked_settings(found: type, settings: PythonOptimizer) -> dict[str, Any]:
    """Return the settings with the types of the class's signature. Raises LearnerError with every mistake."""
    parameters = inspect.signature(found).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in ("params", "lr")]
    given, mistakes = {}, []
    for name, value in settings.settings.items():
        if name not in parameters and not open_ended:
            hint = did_you_mean(name, known, f"it has {', '.join(known) or 'none'}")
            mistakes.append(f"{name}: no such setting; {hint}")
            continue
        try:
            given[name] = TypeAdapter(_hint(found, name)).validate_python(value)
        except PydanticUserError:  # a type of which only the class itself knows what it takes
            given[name] = value
        except ValidationError as error:
            mistakes.append(f"{name} = {value!r}: {error.errors()[0]['msg']}")
    if mistakes:
        raise LearnerError("; ".join(mistakes), where=settings.path, fix="correct optimizer.settings")
    return given


def _hint(found: type, name: str) -> Any:
    """Return the type that a class's signature gives a setting; Any if it cannot be read, as one that is imported only for type
    checkers.
    """
    start: Any = inspect.unwrap(found.__init__)  # type: ignore[misc]  # of a class, not of an instance
    alone = SimpleNamespace(__annotations__={name: getattr(start, "__annotations__", {}).get(name, Any)})
    try:
        return get_type_hints(alone, getattr(start, "__globals__", {}))[name]
    except Exception:
        return Any
