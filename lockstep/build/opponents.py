"""Frozen adapters as opponents of a policy: each has its own base on the CPU, with an engine that runs in a thread.

The run's engine samples from one set of weights, whose proof is part of every step; another adapter there would have to be
switched on and off between its token steps. A second model keeps the two apart. It costs the memory of the base once more, on
the host, and the processor time of its replies: a prompt of some hundred tokens and a few tokens for each of its moves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.build.adapter_folder import find_adapter
from lockstep.build.warm_start import checkpoint_at, find_parent, load_base
from lockstep.chat.chat import ChatFormat
from lockstep.config import schema
from lockstep.config.load import load
from lockstep.config.schema import Recipe
from lockstep.errors import EngineError, TaskError
from lockstep.learner.adapter_files import Base, read_base
from lockstep.learner.adapter_set import AdapterSet
from lockstep.models import load_model, load_tokenizer, resolve, resolve_dtype
from lockstep.models.attention import NAME as ATTENTION
from lockstep.rollout.build import native_engine
from lockstep.tasks.base import BuiltTask
from lockstep.tasks.mixed import Mixed
from lockstep.tasks.open_spiel import SpielGames
from lockstep.track.places import run_of
from lockstep.track.rundir import RunDirectory
from lockstep.types import Message, Request, RolloutEngine, Sampling

WHERE = "task.rival.path"
DTYPES: Mapping[str, Literal["bf16", "fp32"]] = {"bfloat16": "bf16", "float32": "fp32"}
"""Precision of an adapter's base by its saved dtype, so that its fingerprint can be compared."""


T = TypeVar("T", bound=schema.Task)


@dataclass(frozen=True, slots=True)
class Place:
    """An adapter and the recipe it was trained with."""

    folder: Path
    label: str
    """Example: "runs/first at step 40"."""
    recipe: Recipe | None = None
    """Recipe of the run that trained it; None for a folder on its own."""


def load_opponents(task: BuiltTask, recipe: Recipe) -> None:
    """Load the adapters that a task's games are played against, before anything else is loaded.

    Raises TaskError for a folder that is missing or holds no adapter, and for an adapter of another model; ModelError or
    CheckpointError if its files are damaged or it does not fit.
    """
    for member in task.members if isinstance(task, Mixed) else (task,):
        if isinstance(member, SpielGames) and member.rival is not None:
            member.seat(load_opponent(member.rival, recipe))


def pinned_opponents(recipe: Recipe) -> Recipe:
    """Resolve the recipe's opponents to concrete checkpoints, so that a resume plays against the same ones.

    Raises the errors of find_opponent: TaskError or CheckpointError.
    """
    task = recipe.task
    if not isinstance(task, schema.MixedTask):
        return recipe.model_copy(update={"task": _pinned(task)})
    shares = {name: share.model_copy(update={"task": _pinned(share.task)}) for name, share in task.tasks.items()}
    return recipe.model_copy(update={"task": task.model_copy(update={"tasks": shares})})


def _pinned(task: T) -> T:
    if not isinstance(task, schema.OpenSpielTask) or task.rival is None:
        return task
    rival = task.rival.model_copy(update={"path": str(find_opponent(task.rival.path).folder)})
    return task.model_copy(update={"rival": rival})


def load_opponent(settings: schema.Rival, recipe: Recipe) -> OpponentSampler:
    """Load the adapter over the recipe's model. It is prompted with the chat format of the run that trained it, if known."""
    place = find_opponent(settings.path)
    _require_model(place, recipe)
    made_for, _ = read_base(place.folder)
    resolved = resolve(recipe.model)
    asked = DTYPES.get(made_for.dtype, recipe.model.dtype) if made_for is not None else recipe.model.dtype
    dtype = resolve_dtype(asked, "cpu")
    base = load_model(resolved, dtype=dtype, device="cpu", attention=ATTENTION)
    load_base(base, find_parent(place.recipe) if place.recipe else None)  # its run may have begun with a warm start
    adapters = AdapterSet(base, Base.of(base, resolved.name))
    warning = adapters.attach("rival", place.folder)
    adapters.activate("rival")
    generation: Any = base.generation_config
    tokenizer = load_tokenizer(resolved)
    chat = ChatFormat(tokenizer, (place.recipe or recipe).chat, getattr(generation, "eos_token_id", None))
    decode: Any = tokenizer.decode
    engine = native_engine(adapters.model, slots=settings.slots, stop_ids=frozenset(chat.stop_ids), decode=decode)
    engine.load(iter(()), 0)
    bytes_held = sum(p.numel() * p.element_size() for p in adapters.model.parameters())
    note = (
        f"the opponent is {place.label}, frozen, over {resolved.name} in {str(dtype).removeprefix('torch.')} on the CPU "
        f"({bytes_held / 2**30:.2f} GiB)"
    )
    return OpponentSampler(engine, chat, settings, f"{note}; {warning}" if warning else note)


def find_opponent(name: str) -> Place:
    """Find the adapter that a path names. Raises TaskError if the path holds no adapter, CheckpointError if it is damaged."""
    path = Path(name).expanduser()
    if not path.is_dir():
        raise TaskError(
            "there is no such folder",
            where=f"{WHERE}={name}",
            fix="set the path of a run with an adapter, or of an adapter's folder",
        )
    info = checkpoint_at(path)
    found = find_adapter(info.path if info is not None else path)
    if found is None:
        what = (
            "this run or checkpoint trained all weights and has no adapter"
            if info is not None
            else "the folder holds no adapter in PEFT's layout"
        )
        raise TaskError(
            what, where=f"{WHERE}={name}", fix="set the path of a run with an adapter, or of an adapter's folder"
        )
    if info is None:
        return Place(found.path, str(path))
    run = run_of(info.path.resolve())
    recipe = load([str(RunDirectory.open(run).recipe_path)]) if run is not None else None
    return Place(found.path, f"{run or path} at step {info.step}", recipe)


def _require_model(place: Place, recipe: Recipe) -> None:
    """Compare the models by name, before anything is loaded; their weights are compared once they are loaded."""
    if place.recipe is None:
        return
    theirs, ours = place.recipe.model, recipe.model
    if (theirs.path, theirs.revision) != (ours.path, ours.revision):
        raise TaskError(
            f"{place.label} was trained on {theirs.path}{f' ({theirs.revision})' if theirs.revision else ''}, but this run "
            f"trains {ours.path}{f' ({ours.revision})' if ours.revision else ''}",
            where=WHERE,
            fix="set the path of an adapter that was trained on this run's model",
        )


class OpponentSampler:
    """Samples the replies in a thread while any are requested; later requests join the running batch."""

    def __init__(self, engine: RolloutEngine, chat: ChatFormat, settings: schema.Rival, note: str) -> None:
        self.note = note
        self._engine, self._chat = engine, chat
        self._sampling = Sampling(settings.max_tokens, settings.temperature)
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None

    def ask(self, key: str, question: Sequence[Message], seed: int) -> None:
        ids = self._chat.render(question)
        self._inbox.put(
            Request(key, ids, key, seed, self._sampling, self._engine.version, self._chat.shared_prefix(ids))
        )
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="lockstep-rival")
            self._thread.start()

    def poll(self, seconds: float) -> list[tuple[str, str]]:
        found, until = [], time.monotonic() + seconds
        while True:
            if self._broken is not None:
                raise EngineError(
                    f"the opponent's engine failed: {self._broken}", where=WHERE, fix="resume the run"
                ) from self._broken
            try:
                found.append(self._outbox.get_nowait())
            except queue.Empty:
                if found or (left := until - time.monotonic()) <= 0:
                    return found
                try:
                    found.append(self._outbox.get(timeout=min(left, 0.1)))
                except queue.Empty:
                    continue

    def _serve(self) -> None:
        try:
            while True:
                self._engine.submit([self._inbox.get(), *self._waiting()])
                for completion in self._engine.completed(self._admit):
                    self._outbox.put((completion.request.id, self._chat.answer(completion.ids)))
        except Exception as error:  # passed on to every caller that waits for its replies
            self._broken = error

    def _admit(self) -> None:
        if requests := self._waiting():
            self._engine.submit(requests)

    def _waiting(self) -> list[Request]:
        found: list[Request] = []
        while True:
            try:
                found.append(self._inbox.get_nowait())
            except queue.Empty:
                return found
