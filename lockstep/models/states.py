"""Runs recurrent layers (gated delta nets, Mamba, short convolutions) on packed streams of several sequences.

In transformers such a layer expects one sequence per row and reads its state from a cache. On a packed stream its `forward` is
replaced by a call of the stream's Layout, which runs the layer once for each piece, with the state that the piece begins with.

Legend: T tokens of the stream, N rows, H hidden.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lockstep.errors import EngineError

State: TypeAlias = Mapping[tuple[str, int], Tensor]
"""Tensors that a layer passes on, each [N, …]: the last inputs of its convolutions ("conv"), its memories ("recurrent")."""
Run: TypeAlias = Callable[[Tensor, State | None], tuple[Tensor, State]]
"""A layer's own pass over rows of equal length: [N, T, H] and the state before them to [N, T, H] and the state behind."""
CACHES = ("cache_params", "past_key_values")
"""Names under which these layers take a cache."""
UPDATE = "mamba2_selective_state_update"
_NO_LIMIT = 0.0, float("inf")
_STEPS: ContextVar[tuple[float, float]] = ContextVar("_STEPS", default=_NO_LIMIT)
"""Smallest and largest time step of the Mamba 2 layer that runs now."""


def state_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a transformers model that carry a state: layers with a convolution of their own and a cache."""
    return [module for module in model.modules() if _carries(module)]


def follow_layouts(model: nn.Module) -> None:
    """Replace the forward pass of every layer with a state by one that asks the layout. A second call changes nothing."""
    for module in state_layers(model):
        replaced: Any = module
        if not isinstance(module.__dict__.get("forward"), _ByLayout):
            replaced.forward = _ByLayout(module)
        names = vars(sys.modules[type(module).__module__])
        if UPDATE in names and not isinstance(names[UPDATE], _Limited):
            names[UPDATE] = _Limited(names[UPDATE])


def first_state(module: nn.Module, hidden: int) -> State:
    """Return a layer's state behind one token of zeros, for its sizes; the model may be on the meta device."""
    carried, like = _Carried(None), next(module.parameters())
    with torch.no_grad():
        type(module).forward(module, like.new_zeros(1, 1, hidden), **{_cache_of(module): carried})
    return carried.state


def no_layout(module: nn.Module) -> EngineError:
    """Return the error of a pass that was not told where sequences begin."""
    return EngineError(
        "the model was called without a token layout",
        where=type(module).__name__,
        fix="call the model through the learner or the engine, or load it again with another attention implementation",
    )


def rows_of(state: State, count: int) -> State:
    """Return the state of one row, as often as `count` rows need it."""
    return {key: tensor.expand(count, *tensor.shape[1:]) for key, tensor in state.items()}


class _ByLayout:
    """Replacement of a layer's forward. It is a class so that a copy of the model copies it, too."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.cache = module, _cache_of(module)

    def __call__(self, hidden_states: Tensor, *_: Any, layout: Any = None, **others: Any) -> Tensor:
        module: Any = self.module
        if layout is None:
            raise no_layout(module)
        for name in (*CACHES, "attention_mask"):
            others.pop(name, None)

        def run(hidden_NTH: Tensor, state: State | None) -> tuple[Tensor, State]:
            carried, limit = _Carried(state), _STEPS.set(getattr(module, "time_step_limit", _NO_LIMIT))
            try:
                output = type(module).forward(module, hidden_NTH, **{self.cache: carried}, **others)
            finally:
                _STEPS.reset(limit)
            return output, carried.state

        output_TH: Tensor = layout.mix(module.layer_idx, hidden_states[0], run)
        return output_TH[None]


class _Limited:
    """Update of a Mamba 2 layer's state by one token that keeps the limits of time steps, as longer passes do.

    transformers (5.23) forgets them here: Nemotron-H, which has one, would not sample as it trains.
    """

    def __init__(self, update: Any) -> None:
        self.update = update

    def __call__(
        self, state: Tensor, hidden: Tensor, dt: Tensor, *others: Any, dt_bias: Tensor, dt_softplus: bool, **more: Any
    ) -> Any:
        dt = nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*_STEPS.get())
        return self.update(state, hidden, dt, *others, **more)


class _Carried:
    """The part of transformers' Cache that such layers use, of one pass; it writes to no tensor, so gradients pass through."""

    def __init__(self, state: State | None) -> None:
        self.state: dict[tuple[str, int], Tensor] = dict(state or {})

    @property
    def layers(self) -> Mapping[int, SimpleNamespace]:
        """Return what earlier versions of transformers (5.17) read of a layer, whatever its index."""
        kinds = ("conv", "recurrent")
        conv, recurrent = ({i: t for (name, i), t in self.state.items() if name == kind} for kind in kinds)
        layer = SimpleNamespace(record_past=True, conv_states=conv, recurrent_states=recurrent)
        return defaultdict(lambda: layer)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return bool(self.state)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Return True, which keeps a layer from writing a new token into the state that it got."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        before, size = self.state.get(("conv", state_idx)), conv_kernel_size or conv_states.shape[-1]
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        missing = max(0, size - whole.shape[-1])
        self.state["conv", state_idx] = nn.functional.pad(whole, (missing, 0))[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.state["recurrent", state_idx] = recurrent_states
        return recurrent_states


def _carries(module: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves and hasattr(module, "layer_idx") and bool(_cache_of(module))


def _cache_of(module: nn.Module) -> str:
    """Return the name under which a module takes a cache; empty if it takes none."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHES if name in names), "")
