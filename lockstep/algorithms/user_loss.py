"""A user-defined policy loss: def loss(inputs, **settings) in a Python file. Its result is checked at every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.config.algorithm import PythonLoss
from lockstep.config.section import Json
from lockstep.errors import LearnerError
from lockstep.types import LossInput, LossOutput
from lockstep.user_code import describe, load_callable, signature_of
from lockstep.workers.watched import HungError, run_watched

TRIAL_S = 60.0
"""Seconds that a loss may take when it is tried; one that is compiled takes some."""
_RETURN = "return one finite loss per token, like inputs.logprobs_T and with gradient, alone or in a LossOutput"


@dataclass(frozen=True, slots=True)
class UserLoss:
    """A types.Loss around the user's function. Raises LearnerError, with the function's name, for an unusable result."""

    function: Callable[..., object]
    path: str
    settings: Mapping[str, Json]

    def __call__(self, inputs: LossInput) -> LossOutput:
        try:
            result = self.function(inputs, **self.settings)
        except Exception as error:
            file = Path(self.path.rpartition(":")[0]).expanduser()
            raise LearnerError(
                f"the loss fails: {describe(error, file)}", where=self.path, fix="correct the function"
            ) from error
        output = result if isinstance(result, LossOutput) else LossOutput(self._tensor(result, "the loss", inputs))
        loss_T = self._tensor(output.loss_T, "the loss", inputs)
        if not bool(torch.isfinite(loss_T).all()):
            bad = int((~torch.isfinite(loss_T)).nonzero()[0])
            raise self._wrong(f"the loss of token {bad} of {loss_T.numel()} is {loss_T[bad].item()}")
        if inputs.logprobs_T.requires_grad and not loss_T.requires_grad:
            raise self._wrong("the loss has no gradient: it was detached, or does not depend on inputs.logprobs_T")
        for metrics in (output.means, output.maxima):
            if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
                raise self._wrong(f"the metrics of the loss are {metrics!r:.80}, not tensors by name")
        for name, value_T in {**output.means, **output.maxima}.items():
            self._tensor(value_T, f"the metric {name}", inputs)
        return output

    def _tensor(self, value: object, what: str, inputs: LossInput) -> Tensor:
        like_T = inputs.logprobs_T
        if not isinstance(value, Tensor):
            raise self._wrong(f"{what} is a {type(value).__name__}, not a tensor")
        if value.shape != like_T.shape:
            raise self._wrong(f"{what} has the shape {list(value.shape)}, not {list(like_T.shape)}")
        if value.device != like_T.device:
            raise self._wrong(f"{what} is on {value.device}, not on {like_T.device}")
        return value

    def _wrong(self, what: str) -> LearnerError:
        return LearnerError(what, where=self.path, fix=_RETURN)


def load_loss(settings: PythonLoss, *, reference: bool) -> UserLoss:
    """Load the function at the settings' path and try it on three made-up tokens. Raises LearnerError if it cannot be used.

    `reference`: its inputs have log-probabilities of the reference model.
    """
    found = UserLoss(load_function(settings.path, "inputs", settings.settings), settings.path, settings.settings)
    old_T = torch.tensor([-0.5, -1.5, -1.0])
    rest = (old_T - 0.05, torch.tensor([1.0, 1.0, -1.0]), torch.full((3,), 0.9), torch.tensor([0, 0, 1]), 2)
    tried = LossInput((old_T + 0.1).requires_grad_(), old_T, *rest, old_T - 0.2 if reference else None, order=(0, 1))
    try:
        run_watched(lambda _: found(tried), TRIAL_S)
    except HungError as error:
        what = f"the loss did not return within {TRIAL_S:g} s on three tokens"
        raise LearnerError(what, where=settings.path, fix="correct the function") from error
    except LearnerError as error:
        if not _of_another_device(error):
            raise
    return found


def _of_another_device(error: LearnerError) -> bool:
    """Return whether a loss may only fail on a CPU: it has tensors on a GPU, or is compiled, for which a CPU needs a compiler."""
    compiler = type(error.__cause__).__module__.startswith(("torch._dynamo", "torch._inductor"))
    return compiler or "cuda" in error.what.lower()


def load_function(path: str, first: str, settings: Mapping[str, Json]) -> Callable[..., object]:
    """Load a user's function and see that it takes (first, **settings). Raises LearnerError."""
    function = load_callable(path, LearnerError)
    if inspect.iscoroutinefunction(function):
        raise LearnerError(
            "the function is async, but Lockstep does not await it", where=path, fix="define it with def, not async def"
        )
    signature = signature_of(function, path, LearnerError)
    try:
        signature.bind(None, **settings)
    except TypeError as error:
        names = ", ".join([first, *(f"{name}={value!r}" for name, value in settings.items())])
        raise LearnerError(
            f"the function is defined with {signature}, but would be called with ({names}): {error}",
            where=path,
            fix=f"define it with ({', '.join([first, *settings])})"
            + (", or change its settings in the recipe" if settings else ""),
        ) from error
    return function
