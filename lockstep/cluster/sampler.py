"""A worker with a model and an engine: the methods that the driver calls on every worker, and those of one that only samples.

All methods are called by one thread, one after the other.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lockstep.build.build import adopt, build_engine, build_policy
from lockstep.build.parts import Policy
from lockstep.checkpoint.state import read_tensors, write_tensors
from lockstep.cluster.channel import Channel
from lockstep.cluster.messages import GIVEN, WEIGHTS, Facts
from lockstep.cluster.wire import Place
from lockstep.config.load import load_mapping
from lockstep.config.schema import Recipe
from lockstep.device import choose_device, gpu_memory, gpu_peak, keep_objects, use_gpu
from lockstep.learner.ranks import assign_owners
from lockstep.models.weights import clean_name, frozen_names, load_weights, named_weights
from lockstep.sync.control import Falsified
from lockstep.sync.fingerprint import Fingerprints, fingerprint
from lockstep.types import Completion, Forward, ForwardReport, Request, RolloutEngine, TokenIds, WeightStream


class Sampler:
    """A worker that only samples. `build` comes first, then `join`."""

    def __init__(self, place: Place) -> None:
        self._place, self._folder = place, Path(place.folder)
        self._running: Iterator[Completion] | None = None
        self._falsified: Falsified | None = None

    def available(self) -> float:
        """Return the bytes that this worker's GPU has free."""
        use_gpu(self._place.rank)
        return gpu_memory()[0]

    def gpu_peak(self) -> tuple[int, int] | None:
        """Return the most bytes in use and kept on this worker's GPU so far; None on a CPU."""
        return gpu_peak()

    def build(self, recipe: str, weights: bool) -> Facts | None:
        """Build model and engine. `weights`: a file of the folder replaces the start's. The driver has the facts of a trainer."""
        self._prepare(recipe)
        self._load(build_policy(self._recipe, replaced=weights and self._recipe.adapter.kind == "none"), weights)
        keep_objects()
        return None

    def _prepare(self, recipe: str) -> None:
        """Read the recipe, and take this worker's device."""
        given = load_mapping(json.loads(recipe))
        self._recipe: Recipe = given.model_copy(update={"threads": given.threads or self._place.threads})
        self._device = choose_device(given.device)
        if self._device.type == "cuda":
            use_gpu(self._place.rank)

    def _load(self, policy: Policy, weights: bool) -> None:
        """Load the weights of the folder if there are any, and build the engine."""
        if weights:
            load_weights(policy.model, iter(adopt(policy, read_tensors(self._folder / GIVEN)).items()))
        self._chat, self._model = policy.chat, policy.model
        self._engine: RolloutEngine = build_engine(policy, self._recipe)
        self._trained = {clean_name(n): p for n, p in policy.model.named_parameters() if p.requires_grad}

    # --- weights --------------------------------------------------------------------------------------------------
    def join(self, meet: str) -> str:
        """Open a channel from each trainer, with all other samplers; returns a hash of what will travel."""
        own, size = self._place.rank - self._place.size + 1, self._place.samplers + 1
        self._channels = [Channel(f"{meet}_{rank}", own, size, self._device) for rank in range(self._place.size)]
        return self._layout()

    def take(self) -> None:
        """Receive the trained tensors from their owners."""
        for rank, channel in enumerate(self._channels):
            channel.send(self._owned(rank))

    def serve(self, version: int) -> None:
        """Become a version of the weights, which are here."""
        self._engine.load(iter(()), version)

    def _owned(self, rank: int) -> list[Tensor]:
        """Return the tensors that a trainer owns, in an order that all know."""
        owner = assign_owners({name: p.numel() for name, p in self._trained.items()}, self._place.size)
        return [p.detach() for name, p in self._trained.items() if owner[name] == rank]

    def _layout(self) -> str:
        names = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._trained.items()]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    # --- engine ---------------------------------------------------------------------------------------------------
    def sample(self, requests: list[Request], seconds: float) -> list[Completion]:
        """Take requests and decode; returns the completions after about this time, or as soon as nothing is left.

        The driver has the prompts: they are left out.
        """
        self._engine.submit(requests)
        end, found = time.monotonic() + seconds, list[Completion]()
        self._running = self._running or self._engine.completed()
        for one in self._running:
            found.append(one)
            if time.monotonic() > end:
                break
        else:
            self._running = None
        read = self._chat.read_many([one.ids for one in found])
        return [
            replace(one, request=replace(one.request, prompt_ids=()), read=texts)
            for one, texts in zip(found, read, strict=True)
        ]

    def drop(self) -> None:
        """Drop all requests."""
        self._running = None
        self._engine.close()

    def score(self, sequences: list[TokenIds]) -> list[tuple[float, ...]]:
        """Return the engine's log-probability of every token but the first."""
        return self._engine.score(sequences)

    def set_forward(self, forward: Forward) -> ForwardReport:
        """Set the engine's precision and noise."""
        return self._engine.set_forward(forward)

    def held(self) -> Fingerprints:
        """Return fingerprints of what the engine samples with."""
        return fingerprint(self._engine.weights())

    def write_weights(self) -> None:
        """Write what the engine samples with into the folder."""
        write_tensors(self._folder / WEIGHTS, dict(self._engine.weights()))

    def falsify(self) -> str:
        """Flip one bit of a trained tensor; returns its name. Called again, flip it back."""
        if self._falsified is None:
            self._falsified = Falsified(self, frozen_names(self._model))
            return self._falsified.name
        falsified, self._falsified = self._falsified, None
        return falsified.undo()

    def weights(self) -> WeightStream:
        """Return the model's weights."""
        return named_weights(self._model)
