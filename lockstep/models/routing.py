"""Routing replay (R3): records the experts that a mixture's routers choose in sampling, and uses the same experts in training.

A router chooses by `torch.topk` over the scores of all experts. Within its forward pass that call is intercepted: it returns
the recorded experts with their present scores, so that probabilities, and gradients through them, are those of the present
weights.

Legend: T tokens of the stream, L routers, K experts of a token, X = L · K.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.errors import DEFECT, LearnerError, ModelError

NONE = -1
"""Marks a token without a record: its router chooses by itself."""
_MARK = "lockstep_routing"


@dataclass(slots=True)
class Routing:
    """The routers of a model in order, and what they are to choose in the present pass."""

    routers: tuple[Any, ...]
    recording: bool = False
    given_TX: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Experts [T, K] that each router would choose by itself in the present pass."""

    @staticmethod
    def of(model: nn.Module) -> Routing:
        """Return the one object of a model, made at the first call. Raises ModelError for a model without known routers."""
        there: Routing | None = model.__dict__.get(_MARK)
        if there is None:
            there = Routing(tuple(module for module in model.modules() if _routes(module)))
            if not there.routers:
                raise ModelError(
                    f"no layer of {type(model).__name__} is a router that chooses experts by its weight alone",
                    where="update.replay_routing",
                    fix="set update.replay_routing=false: without such routers there is nothing to replay",
                )
            for place, router in enumerate(there.routers):
                router.forward = _Forward(there, place, router)
            model.__dict__[_MARK] = there
        return there

    def begin(self, given_TX: Tensor | None, *, recording: bool) -> None:
        """Start a pass over a stream: with recorded experts (NONE where there are none), or with a record of its own."""
        self.given_TX, self.recording, self.chosen = given_TX, recording, {}

    @property
    def row(self) -> Row:
        """Return what a token's record looks like."""
        return Row(tuple(int(router.top_k) for router in self.routers), max(int(r.num_experts) for r in self.routers))

    def taken(self, tokens: int) -> npt.NDArray[np.uint16]:
        """Return the experts of the first `tokens` of the pass, [T, X]. Rows behind them are padding."""
        chosen_TX = torch.cat([self.chosen[place] for place in range(len(self.routers))], 1)[:tokens]
        return chosen_TX.cpu().numpy().astype(np.uint16)

    def differing(self) -> tuple[Tensor, Tensor]:
        """Return how many of the given choices the present weights would not make, and how many were given."""
        assert self.given_TX is not None
        differ = total = self.given_TX.new_zeros(())
        at = 0
        for place in range(len(self.routers)):
            own_TK = self.chosen[place][: len(self.given_TX)]
            given_TK = self.given_TX[:, at : at + own_TK.shape[1]]
            at += own_TK.shape[1]
            known_TK = given_TK >= 0
            same_TK = (given_TK[:, :, None] == own_TK[:, None, :]).any(-1)
            differ, total = differ + (known_TK & ~same_TK).sum(), total + known_TK.sum()
        return differ, total


def follow_routes(model: nn.Module, given_TX: Tensor | None) -> None:
    """Make the next pass of a model choose the given experts; with None, or for rows behind the given ones, its own."""
    routing: Routing | None = model.__dict__.get(_MARK)
    if routing is not None:
        routing.begin(given_TX, recording=False)


@dataclass(frozen=True, slots=True)
class Row:
    """The form of a token's record: experts of each router, in bytes (two for each where there are more than 256)."""

    counts: tuple[int, ...]
    experts: int

    @property
    def numbers(self) -> int:
        return sum(self.counts)

    @property
    def kind(self) -> type[np.uint8] | type[np.uint16]:
        return np.uint8 if self.experts <= 256 else np.uint16

    def pack(self, routes_TX: npt.NDArray[np.uint16]) -> bytes:
        return routes_TX.astype(self.kind).tobytes()

    def unpack(self, record: bytes, tokens: int) -> npt.NDArray[np.int64]:
        """Return the experts of a record, [tokens, L · K]. Raises LearnerError for a record that cannot be this sequence's."""
        flat = np.frombuffer(record, self.kind)
        if len(flat) != tokens * self.numbers:
            raise _wrong(
                f"the recorded routes have {len(record)} bytes, wrong for {tokens} tokens with {self.numbers} experts each"
            )
        routes_TX: npt.NDArray[np.int64] = flat.reshape(tokens, self.numbers).astype(np.int64)
        if flat.size and int(flat.max()) >= self.experts:
            raise _wrong(
                f"the recorded routes name expert {int(flat.max())}, but the model has only experts 0 to {self.experts - 1}"
            )
        at = 0
        for count in self.counts:
            ordered_TK = np.sort(routes_TX[:, at : at + count], 1)
            if count > 1 and (ordered_TK[:, 1:] == ordered_TK[:, :-1]).any():
                raise _wrong("the recorded routes send a token to one expert twice")
            at += count
        return routes_TX


class _Forward:
    """Replacement of a router's forward. It is a class so that a copy of the model copies it, too."""

    def __init__(self, routing: Routing, place: int, router: Any) -> None:
        self.routing, self.place, self.router = routing, place, router

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing, router = self.routing, self.router
        theirs: Any = type(router).forward
        if not routing.recording and routing.given_TX is None:
            return theirs(router, *args, **kwargs)
        given_TK = None
        if routing.given_TX is not None:
            counts = routing.row.counts
            at = sum(counts[: self.place])
            given_TK = routing.given_TX[:, at : at + counts[self.place]]
        choice = _Choice(int(router.num_experts), int(router.top_k), given_TK)
        with choice:
            answer = theirs(router, *args, **kwargs)
        if len(choice.own) != 1:
            raise ModelError(
                f"{type(router).__name__} chooses its experts in {len(choice.own)} steps, which cannot be replayed",
                where="update.replay_routing",
                fix="set update.replay_routing=false for this model",
            )
        routing.chosen.setdefault(self.place, choice.own[0])  # a layer that is computed again chooses the same
        return answer


class _Choice(TorchFunctionMode):
    """Answers the choice of `count` of `experts` for each token."""

    def __init__(self, experts: int, count: int, given_TK: Tensor | None) -> None:
        super().__init__()
        self._shape, self._given_TK = (experts, count), given_TK
        self.own: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or args[0].dim() != 2:
            return answer
        if (args[0].shape[-1], answer.indices.shape[-1]) != self._shape:
            return answer  # of groups of experts
        self.own.append(answer.indices.detach())
        if self._given_TK is None:
            return answer
        given_TK = nn.functional.pad(
            self._given_TK, (0, 0, 0, len(answer.indices) - len(self._given_TK)), value=NONE
        )  # of padding
        chosen_TK = torch.where(given_TK >= 0, given_TK, answer.indices)
        return torch.return_types.topk((args[0].gather(1, chosen_TK), chosen_TK))


def _routes(module: nn.Module) -> bool:
    weight, experts = getattr(module, "weight", None), getattr(module, "num_experts", None)
    choosing = isinstance(getattr(module, "top_k", None), int) and isinstance(experts, int)
    return choosing and isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.shape[0] == experts


def _wrong(what: str) -> LearnerError:
    return LearnerError(f"{what}: they belong to another model or sequence", where="update.replay_routing", fix=DEFECT)
