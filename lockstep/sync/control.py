"""Negative control of the sync proof: one bit of the weights is flipped on purpose, and the proof must then fail."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.errors import SyncError
from lockstep.sync.compare import compare
from lockstep.sync.fingerprint import INTEGERS, fingerprint, splitmix64
from lockstep.types import Learner, Proof, RolloutEngine, WeightStream

CONTROL_KEY = 0x636F6E74726F6C  # "control"


def control_shared(learner: Learner, engine: RolloutEngine, frozen: frozenset[str] = frozenset()) -> str:
    """Flip one bit of a learner's tensor, check that the engine's fingerprint of it changes, and flip the bit back.

    Returns the tensor's name. Raises SyncError if that tensor alone did not differ, or if the bits were not restored.
    """
    before = fingerprint(engine.weights())
    falsified = Falsified(learner.weights, frozen)
    try:
        seen = [mismatch.name for mismatch in compare(before, fingerprint(engine.weights()))]
    finally:
        name = falsified.undo()
    if seen != [name]:
        raise blind(name, seen)
    if fingerprint(engine.weights()).combined != before.combined:
        raise SyncError(
            "the weights were not restored after the negative control", where=name, fix="load the model again"
        )
    return name


def control_copy(
    learner: Learner, engine: RolloutEngine, prove: Callable[[], Proof], frozen: frozenset[str] = frozenset()
) -> str:
    """Send the engine all weights with one bit of one tensor flipped: the proof must name it. Then send the right ones.

    Returns the tensor's name. Raises SyncError if the false weights passed or the right ones did not.
    """
    name = _choose(learner.weights(), frozen)
    engine.load(_falsified(learner.weights(), name), learner.version)
    try:
        false = prove()
    finally:
        engine.load(learner.weights(), learner.version)
    if len(false.mismatched) != 1 or not false.mismatched[0].startswith(f"{name}: "):
        raise blind(name, list(false.mismatched))
    right = prove()
    if right.mismatched:
        raise SyncError(
            "the proof rejects the right weights, which were sent after the negative control: "
            + "; ".join(right.mismatched[:8]),
            where=name,
            fix="check the engine: load() must copy every tensor, and weights() must yield what it samples with",
        )
    return name


class Falsified:
    """Live weights with one flipped bit in one trained tensor, until `undo`."""

    def __init__(self, weights: Callable[[], WeightStream], frozen: frozenset[str]) -> None:
        self.name = _choose(weights(), frozen)
        self._tensor = next(tensor for candidate, tensor in weights() if candidate == self.name)
        _flip(self._tensor)

    def undo(self) -> str:
        """Flip the bit back; returns the tensor's name."""
        _flip(self._tensor)
        return self.name


def blind(name: str, seen: list[str]) -> SyncError:
    """Return the error of a proof that did not notice the flipped bit of a tensor."""
    noticed = f"it reported {', '.join(seen[:8])}" if seen else "it reported nothing"
    return SyncError(
        f"the proof does not detect wrong weights: one bit of {name} was flipped, and {noticed}",
        where="negative control",
        fix="check the engine: weights() must yield what it samples with, and load() must copy every tensor",
    )


def _choose(stream: WeightStream, frozen: frozenset[str]) -> str:
    """Choose a trained tensor with more than one element; the choice depends on the names alone."""
    names = sorted(name for name, tensor in stream if name not in frozen and tensor.numel() > 1)
    if not names:
        raise SyncError(
            "the learner has no trained tensor in which the control can flip a bit",
            where="negative control",
            fix="check that learner.weights() yields a tensor with several elements that is not declared frozen",
        )
    return names[splitmix64(CONTROL_KEY, len(names)) % len(names)]


def _falsified(stream: WeightStream, name: str) -> WeightStream:
    for candidate, tensor in stream:
        if candidate == name:
            copy = tensor.detach().clone()
            _flip(copy)
            yield candidate, copy
        else:
            yield candidate, tensor


@torch.inference_mode()
def _flip(tensor: Tensor) -> None:
    """Flip the lowest bit of one element in the middle, in place: the smallest possible change, and its own inverse."""
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    middle = tuple(size // 2 for size in bits.shape)
    bits[middle] = bits[middle] ^ 1
