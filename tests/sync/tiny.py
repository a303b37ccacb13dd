"""A learner and an engine over a model of a few thousand weights: small, but they train, score and sample for real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from lockstep.errors import StaleWeightsError
from lockstep.types import Batch, Completion, FinishReason, Loss, LossInput, Metrics, Request, TokenIds, WeightStream

VOCAB, HIDDEN = 32, 16
ADAPTED = ("up", "down")


class TinyModel(nn.Module):
    """Next-token logits from the last two tokens, through two square layers, each with an adapter."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.lora_A = nn.ParameterDict({name: nn.Parameter(0.3 * torch.randn(2, HIDDEN)) for name in ADAPTED})
        self.lora_B = nn.ParameterDict({name: nn.Parameter(0.3 * torch.randn(HIDDEN, 2)) for name in ADAPTED})
        self.scaling = dict.fromkeys(ADAPTED, 2.0)
        self.to(dtype)

    def forward(self, ids_T: Tensor) -> Tensor:
        hidden_TH = self.embed(ids_T)
        hidden_TH = hidden_TH + nn.functional.pad(hidden_TH[:-1], (0, 0, 1, 0))
        for name, layer in (("up", self.up), ("down", self.down)):
            delta_TH = hidden_TH @ self.lora_A[name].T @ self.lora_B[name].T * self.scaling[name]
            hidden_TH = hidden_TH + torch.tanh(layer(hidden_TH) + delta_TH)
        logits_TV: Tensor = self.head(hidden_TH)
        return logits_TV

    def logprobs(self, ids: TokenIds) -> Tensor:
        ids_T = torch.tensor(ids)
        logprobs_TV = self(ids_T[:-1]).float().log_softmax(-1)
        return logprobs_TV.gather(-1, ids_T[1:, None])[:, 0]

    def stream(self) -> WeightStream:
        for name, parameter in self.named_parameters():
            yield name, parameter.detach()
        for name, scaling in self.scaling.items():
            yield f"{name}.lora_scaling", torch.tensor([scaling])


BASE = frozenset(name for name, _ in TinyModel().named_parameters() if "lora" not in name)


class TinyLearner:
    """Plain gradient descent on the parameters that are not frozen."""

    def __init__(self, model: TinyModel, frozen: frozenset[str] = frozenset(), lr: float = 0.1) -> None:
        self.model, self.version, self.lr = model, 0, lr
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        with torch.no_grad():
            return [tuple(self.model.logprobs(ids).tolist()) for ids in sequences]

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        total = torch.zeros(())
        for sequence in batch.sequences:
            logprobs_T = self.model.logprobs(sequence.prompt_ids + sequence.ids)[-len(sequence.ids) :]
            output = loss(
                LossInput(
                    logprobs_T=logprobs_T,
                    old_logprobs_T=logprobs_T.detach(),
                    rollout_logprobs_T=torch.tensor(sequence.rollout_logprobs),
                    advantages_T=torch.tensor(sequence.advantages),
                    entropy_T=torch.zeros_like(logprobs_T),
                    sequence_T=torch.zeros(len(logprobs_T), dtype=torch.int64),
                    sequences=1,
                )
            )
            total = total + sequence.weight * output.loss_T.sum()
        total.backward()
        self.step()
        return {"loss": float(total.detach())}

    def step(self) -> None:
        """Apply what gradients there are; without any, every trained tensor still moves a little."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    gradient = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
                    parameter -= self.lr * gradient
                    parameter.grad = None
        self.version += 1

    def weights(self) -> WeightStream:
        return self.model.stream()


class TinyEngine:
    """Samples and scores with the model it is given: the learner's own, or a copy of it."""

    def __init__(self, model: TinyModel) -> None:
        self.model, self.version = model, -1
        self.loads: list[list[str]] = []
        """The names that each load received."""
        self._queue: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        if any(request.version != self.version for request in requests):
            raise StaleWeightsError(f"the engine holds version {self.version}")
        self._queue.extend(requests)

    def completed(self) -> Iterator[Completion]:
        while self._queue:
            request = self._queue.pop()
            generator = torch.Generator().manual_seed(request.seed)
            ids: list[int] = list(request.prompt_ids)
            chosen: list[float] = []
            for _ in range(request.sampling.max_tokens):
                with torch.no_grad():
                    logprobs_V = self.model(torch.tensor(ids))[-1].float().log_softmax(-1)
                ids.append(int(torch.multinomial(logprobs_V.exp(), 1, generator=generator)))
                chosen.append(float(logprobs_V[ids[-1]]))
            sampled = tuple(ids[len(request.prompt_ids) :])
            yield Completion(request, sampled, tuple(chosen), FinishReason.LENGTH, self.version)

    def score(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        with torch.no_grad():
            return [tuple(self.model.logprobs(ids).tolist()) for ids in sequences]

    def load(self, weights: WeightStream, version: int) -> None:
        parameters = dict(self.model.named_parameters())
        names = []
        with torch.no_grad():
            for name, tensor in weights:
                names.append(name)
                if name in parameters:
                    parameters[name].copy_(tensor)
                else:
                    self.model.scaling[name.removesuffix(".lora_scaling")] = float(tensor)
        self.loads.append(names)
        self.version = version

    def weights(self) -> WeightStream:
        return self.model.stream()

    def close(self) -> None:
        self._queue.clear()


class FaultyEngine(TinyEngine):
    """An engine whose load goes wrong: `fault` is applied to what arrives, `times` times."""

    def __init__(self, model: TinyModel, fault: Callable[[WeightStream], WeightStream], times: int = 1_000_000) -> None:
        super().__init__(model)
        self.fault, self.times = fault, times

    def load(self, weights: WeightStream, version: int) -> None:
        if self.times > 0:
            self.times -= 1
            weights = self.fault(weights)
        super().load(weights, version)


class MisreportingEngine(TinyEngine):
    """An engine that holds other tensors than the learner: `fault` is applied to what it holds."""

    def __init__(self, model: TinyModel, fault: Callable[[WeightStream], WeightStream]) -> None:
        super().__init__(model)
        self.fault = fault

    def weights(self) -> WeightStream:
        return self.fault(super().weights())


def pair(frozen: frozenset[str] = frozenset(), dtype: torch.dtype = torch.float32) -> tuple[TinyLearner, TinyModel]:
    """A learner, and another model with other weights for an engine of its own."""
    learner = TinyLearner(TinyModel(0, dtype), frozen)
    other = TinyModel(1, dtype)
    if frozen:
        other = deepcopy(learner.model)
    return learner, other


def on(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[WeightStream], WeightStream]:
    """A stream in which the tensor `name` is changed, or left out if `change` returns None."""

    def fault(stream: WeightStream) -> WeightStream:
        for candidate, tensor in stream:
            changed = change(tensor.clone()) if candidate == name else tensor
            if changed is not None:
                yield candidate, changed

    return fault


def swap_rows(tensor: Tensor) -> Tensor:
    tensor[[3, 5]] = tensor[[5, 3]]
    return tensor


def flip_bit(tensor: Tensor) -> Tensor:
    tensor.view(torch.int32)[2, 7] ^= 1 << 20
    return tensor
