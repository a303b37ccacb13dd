"""A worker with a model and an engine: the methods that the driver calls on every worker, and those of one that only samples.

The driver calls methods of its engine, too. All are called by one thread, one after the other.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from lockstep.build.build import adopt, build_engine, build_policy, build_weight_sync
from lockstep.build.parts import Policy
from lockstep.checkpoint.state import read_tensors, write_tensors
from lockstep.cluster.wire import GIVEN, WEIGHTS, Place
from lockstep.config.load import load_mapping
from lockstep.config.schema import Recipe
from lockstep.device import choose_device, gpu_memory, gpu_peak, keep_objects, use_gpu
from lockstep.learner.execution import execution_of
from lockstep.learner.frozen import FrozenLearner
from lockstep.learner.ranks import assign_owners
from lockstep.models.weights import clean_name, frozen_names, load_weights, named_weights
from lockstep.noise.targets import Targets
from lockstep.rollout.beside import BesideEngine, Found
from lockstep.sync.channel import Channel
from lockstep.sync.control import Falsified
from lockstep.sync.fingerprint import Fingerprints, fingerprint
from lockstep.sync.transports import CopySync, SharedSync
from lockstep.tasks.build import build_grader
from lockstep.types import Completion, LearnerFacts, NativeRollouts, Request, RolloutEngine

TOGETHER = 32
"""Most replies in a message: the driver works on the first ones while the worker prepares the next."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model, for a driver that has none."""

    learner: LearnerFacts
    numerics: Literal["fp32", "bf16"]
    context: int | None
    stop_ids: tuple[int, ...]
    """Every id that ends a reply."""
    noise: Targets | None


class Sampler:
    """A worker that only samples. `build` comes first, then `join`."""

    engine: RolloutEngine
    _sync: SharedSync | CopySync

    def __init__(self, place: Place) -> None:
        self._place, self._folder = place, Path(place.folder)
        self._given = self._folder / GIVEN
        self._running: Iterator[Completion] | None = None

    def available(self, alone: bool) -> float:
        """Return the bytes that this worker's GPU has free. `alone`: one that only samples sees no other, as vLLM wants it."""
        use_gpu(self._place.rank, alone=alone and self._place.rank >= self._place.size)
        return gpu_memory()[0]

    def gpu_peak(self) -> tuple[int, int, int] | None:
        """Return the most bytes in use and kept on this worker's GPU so far, and all of it; None on a CPU."""
        return gpu_peak()

    def build(self, recipe: str, weights: bool) -> Facts | None:
        """Build model and engine. `weights`: a file of the folder replaces the start's. The driver has the facts of a trainer."""
        self._prepare(recipe)
        policy = build_policy(self._recipe, replaced=weights and self._recipe.adapter.kind == "none")
        if weights:
            load_weights(policy.model, iter(adopt(policy, read_tensors(self._given)).items()))
        self._serve_from(policy, build_engine(policy, self._recipe))
        self._sync = build_weight_sync(policy, self._recipe)
        execution = execution_of(self._recipe.update, self._device)
        self._received = FrozenLearner(policy.model, execution.tokens_per_microbatch)
        keep_objects()
        return None

    def _prepare(self, recipe: str) -> None:
        """Read the recipe, and take this worker's device."""
        given = load_mapping(json.loads(recipe))
        self._recipe: Recipe = given.model_copy(update={"threads": given.threads or self._place.threads})
        self._device = choose_device(given.device)
        if self._device.type == "cuda":
            use_gpu(self._place.rank, alone=given.rollout.engine == "vllm")

    def _serve_from(self, policy: Policy, engine: RolloutEngine) -> None:
        self._model, self.engine, task = policy.model, engine, self._recipe.task
        engines = self._place.samplers or self._place.size
        self._beside = BesideEngine(lambda: build_grader(task, self._recipe.seed, engines), policy.chat.read_many)
        self._trained = {clean_name(n): p for n, p in policy.model.named_parameters() if p.requires_grad}

    # --- weights --------------------------------------------------------------------------------------------------
    def join(self, meet: str) -> str:
        """Open the channel of each trainer, which joins its own alone, with all samplers; returns a hash of what will travel."""
        place, shapes = self._place, [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._trained.items()]
        own, trainers = max(0, place.rank - place.size + 1), range(place.size)
        joined = trainers if own else [place.rank]
        self._channels = {r: Channel(f"{meet}_{r}", own, place.samplers + 1, self._device) for r in joined}
        return hashlib.sha256("\n".join(shapes).encode()).hexdigest()

    def exchange(self) -> None:
        """Send the trained tensors that this rank owns to all samplers, or receive them from their owners."""
        owner = assign_owners({name: p.numel() for name, p in self._trained.items()}, self._place.size)
        for rank, channel in self._channels.items():
            channel.send([p.detach() for name, p in self._trained.items() if owner[name] == rank])

    def take(self, version: int) -> Fingerprints:
        """Become a version of the weights, which are here, and prove the engine; returns their fingerprints."""
        self._received.version = version
        if self._sync.push(self._received, self.engine).changed < 0:
            self._sync.negative_control(self._received, self.engine)
        return self.held() if isinstance(self._sync, CopySync) else self._sync.fingerprints

    def reprove(self) -> Fingerprints:
        """Prove the engine with all of its tensors and the probe, and change nothing; returns fingerprints of the weights."""
        self._sync.verify(self._received, self.engine)
        return self.held() if isinstance(self._sync, CopySync) else self._sync.fingerprints

    # --- engine ---------------------------------------------------------------------------------------------------
    def sample(self, requests: list[Request], seconds: float) -> Found:
        """Take requests and decode; returns replies and grades after about this time, or when there are TOGETHER of either or
        nothing is left.
        """
        self.engine.submit(requests)
        end, found = time.monotonic() + seconds, list[Completion]()
        self._running = self._running or self.engine.completed()
        for one in self._running:
            found.append(one)
            if time.monotonic() > end or len(found) == TOGETHER:
                break
        else:
            self._running = None
        return self._beside.take(found, end if self._running is None else 0.0, TOGETHER)

    def prepare_grader(self) -> None:
        """Build what grades beside the engine."""
        self._beside.build()

    def drop(self) -> None:
        """Drop all requests; vLLM runs them to their ends."""
        self._beside.drop()
        if isinstance(self.engine, NativeRollouts):
            self.engine.close()
        else:
            list(self.engine.completed())
        self._running = None

    def held(self) -> Fingerprints:
        """Return fingerprints of what the engine samples with, or is proven to have a copy of."""
        return fingerprint(named_weights(self._model) if isinstance(self._sync, CopySync) else self.engine.weights())

    def write_weights(self) -> None:
        """Write what the engine samples with into the folder."""
        write_tensors(self._folder / WEIGHTS, dict(self.engine.weights()))

    def falsify(self) -> str:
        """Flip one bit of a trained tensor; returns its name. Called again, flip it back: the choice depends on names alone."""
        return Falsified(partial(named_weights, self._model), frozen_names(self._model)).name
