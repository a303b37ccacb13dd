"""The optimizer of several learners that hold the same weights (ZeRO-2): each owns some tensors.

The owner of a tensor holds its fp32 master weights and moments. After a micro-batch each rank sends the gradients of a tensor
to its owner, which adds them in the order of the micro-batches. After a step the owners send the new weights to all. Whole
tensors are owned, not ranges: every optimizer then computes exactly what it computes in one process, and its state is saved
under the same names, whatever the number of ranks. The price is that the largest tensor cannot be split between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.config.schema import Optimizer
from lockstep.learner.optimizer import MasterOptimizer, StepResult
from lockstep.learner.ranks import Pending, Ranks, assign_owners
from lockstep.learner.sums import add_rows_
from lockstep.sync.fingerprint import TensorPrint, fingerprint

ALIGNMENT = 64
"""Elements: kernels read a tensor that begins at a multiple of this as they read one of its own."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], settings: Optimizer, ranks: Ranks | None
) -> MasterOptimizer | ShardedOptimizer:
    """Return the optimizer of one process, or of this one of several ranks."""
    return MasterOptimizer(parameters, settings) if ranks is None else ShardedOptimizer(parameters, settings, ranks)


class ShardedOptimizer:
    """Steps all parameters together with other ranks; has the methods of MasterOptimizer."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Optimizer, ranks: Ranks) -> None:
        """Build this rank's part. Raises LearnerError for a user's optimizer that cannot be used."""
        self._parameters, self._ranks = dict(parameters), ranks
        self._max_grad_norm = settings.max_grad_norm
        owner = assign_owners({name: p.numel() for name, p in parameters.items()}, ranks.size)
        self.owned = frozenset(name for name in parameters if owner[name] == ranks.rank)
        """Names of the tensors whose masters and moments are here."""
        self._own = MasterOptimizer({n: p for n, p in parameters.items() if n in self.owned}, settings, parameters)
        dtypes = dict.fromkeys(p.dtype for p in parameters.values())
        self._buckets = [_Bucket(parameters, dtype, owner, ranks) for dtype in dtypes]
        slots = {name: slot for bucket in self._buckets for name, slot in bucket.slots.items()}
        self.collected: list[nn.Parameter] = []
        """Parameters whose gradient of a backward pass is complete, since this was last cleared."""
        self._filled: set[str] = set()
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(_sender(name, slots[name], self._filled, self.collected))
        self.truth: dict[str, TensorPrint] = {}
        """Fingerprints of the owned tensors after the last step, before any other rank got them."""
        count = sum(parameters[name].numel() for name in self.owned)
        shard = f"rank {ranks.rank} of {ranks.size}: optimizer of {len(self.owned)} tensors ({count / 1e6:.3g}e6 parameters)"
        self.note = f"{self._own.note}; {shard}" if self._own.note else shard
        """Line for the log."""

    def before_backward(self) -> None:
        """Wait for the gradients that are still being sent: the next ones take their place."""
        for bucket in self._buckets:
            bucket.finish()

    def exchange(self, senders: int) -> None:
        """Send the gradients of a round to their owners; ranks from `senders` on had no micro-batch in it."""
        self.before_backward()
        if self._ranks.rank < senders:
            absent = self._parameters.keys() - self._filled
            for bucket in self._buckets:
                bucket.clear(absent)
        for bucket in self._buckets:
            bucket.start(senders)
        self._filled.clear()

    @torch.no_grad()
    def step(self, lr: float) -> StepResult:
        """Clip and apply the summed gradients, then clear them, and give the new weights to all ranks.

        A non-finite gradient changes nothing on any rank: all know the same norm.
        """
        self.before_backward()
        for bucket in self._buckets:
            for name, total in bucket.totals().items():
                self._own.take_gradient(name, total)
        norm = self._norm()
        result = self._own.apply(norm, lr)
        if math.isfinite(norm):
            self.truth = dict(fingerprint((name, self._parameters[name]) for name in sorted(self.owned)).tensors)
            for bucket in self._buckets:
                bucket.publish(self._parameters)
        self.forget()
        return result

    def _norm(self) -> float:
        """Return the norm of all gradients, from those of the tensors in the order of one process."""
        own = self._own.norms()
        device = next(iter(self._parameters.values())).device
        norms = torch.zeros(len(self._parameters), dtype=torch.float64, device=device)
        places = [place for place, name in enumerate(self._parameters) if name in own]
        if places:
            norms[places] = torch.stack(list(own.values()))
        self._ranks.add(norms)
        return float(torch.linalg.vector_norm(norms))

    def forget(self) -> None:
        """Drop the gradients that were summed so far."""
        self.before_backward()
        for bucket in self._buckets:
            bucket.forget()
        self._own.forget()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._filled.clear()
        self.collected.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the owned tensors, as MasterOptimizer.tensors; all ranks' together are that of one process."""
        return self._own.tensors()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over this rank's part of a whole state. Raises CheckpointError if it belongs to other parameters."""
        names = self._parameters.keys() - self.owned
        self._own.restore({key: tensor for key, tensor in state.items() if key.split(".", 1)[1] not in names})


@dataclass(slots=True)
class _Exchange:
    """Gradients under way."""

    work: Pending
    senders: int


class _Bucket:
    """The gradients of all parameters of one dtype, in the order of their owners, and the sums of the owned ones."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, owner: Mapping[str, int], ranks: Ranks
    ) -> None:
        self._ranks = ranks
        names = sorted((n for n, p in parameters.items() if p.dtype == dtype), key=lambda name: owner[name])
        self._give = [0] * ranks.size
        places: dict[str, int] = {}
        for name in names:
            places[name] = sum(self._give)
            self._give[owner[name]] += -(-parameters[name].numel() // ALIGNMENT) * ALIGNMENT
        device = next(iter(parameters.values())).device
        self._sent = torch.zeros(sum(self._give), dtype=dtype, device=device)
        self.slots = {
            name: self._sent[place : place + parameters[name].numel()].view(parameters[name].shape)
            for name, place in places.items()
        }
        """Views of the sent buffer, by name."""
        first, size = sum(self._give[: ranks.rank]), self._give[ranks.rank]
        self._mine = {
            name: (place - first, parameters[name].shape) for name, place in places.items() if owner[name] == ranks.rank
        }
        self._owner = {name: owner[name] for name in names}
        self._received = torch.empty(size * ranks.size, dtype=dtype, device=device)
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        self._sum = torch.empty(size, dtype=wide, device=device)
        self._begun = False
        self._exchange: _Exchange | None = None

    def clear(self, absent: set[str]) -> None:
        """Set the gradients that a micro-batch did not have to zero."""
        for name in absent & self.slots.keys():
            self.slots[name].zero_()

    def start(self, senders: int) -> None:
        """Send to each owner its part."""
        size = self._give[self._ranks.rank]
        take = [size if rank < senders else 0 for rank in range(self._ranks.size)]
        give = self._give if self._ranks.rank < senders else [0] * self._ranks.size
        work = self._ranks.all_to_all(self._received[: sum(take)], self._sent[: sum(give)], take, give)
        self._exchange = _Exchange(work, senders)

    def finish(self) -> None:
        """Add what was received, rank by rank: that is the order of the micro-batches."""
        if self._exchange is None:
            return
        exchange, self._exchange = self._exchange, None
        exchange.work.wait()
        count, size = exchange.senders, len(self._sum)
        add_rows_(self._sum, self._received[: count * size].view(count, size), begun=self._begun)
        self._begun = True

    def totals(self) -> dict[str, Tensor]:
        """Return the summed gradients of the owned tensors; none if there was no micro-batch."""
        if not self._begun:
            return {}
        return {
            name: self._sum[place : place + math.prod(shape)].view(shape) for name, (place, shape) in self._mine.items()
        }

    def publish(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the owners' weights to all ranks, through the memory of the gradients."""
        mine, others = list(self._mine), [name for name in self.slots if name not in self._mine]
        if mine:
            torch._foreach_copy_([self.slots[name] for name in mine], [parameters[name].detach() for name in mine])
        self._ranks.share(self._sent.split(self._give))
        if others:
            torch._foreach_copy_([parameters[name].detach() for name in others], [self.slots[name] for name in others])

    def forget(self) -> None:
        self._begun = False


def _sender(name: str, slot: Tensor, filled: set[str], collected: list[nn.Parameter]) -> Callable[[Tensor], None]:
    """Return a hook that moves a complete gradient to where it is sent from. It holds no optimizer: see optimizer._noter."""

    def send(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if name in filled:  # the second half of a micro-batch that did not fit
            slot.add_(grad)
        else:
            slot.copy_(grad)
            filled.add(name)
        collected.append(parameter)

    return send
