"""Splits replies into the text of each token, so that the page can colour it, and into sampled and given parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lockstep.chat.continuation import alike
from lockstep.config.load import load
from lockstep.config.schema import Model
from lockstep.errors import LockstepError, ModelError
from lockstep.models.builtin import BUILTINS, builtin_place
from lockstep.models.resolve import HUB_ID
from lockstep.track.rollouts import RolloutRow, StoredBranch
from lockstep.track.rundir import RunDirectory
from lockstep.types import Branch, spans

Decode: TypeAlias = Callable[[Sequence[int]], str]
TOKENIZER = "tokenizer.json"
BROKEN = "\N{REPLACEMENT CHARACTER}"
LEAD = 4
"""Tokens in front of a piece that are decoded with it: some tokenizers write the first of a text without its blank."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of one origin: sampled by the policy, or told by the environment or a tool."""

    sampled: bool
    pieces: tuple[str, ...]
    """Text of each token; "" for one whose bytes are shown with those of a later token."""
    logprobs: tuple[float, ...]
    learner: tuple[float, ...] = ()
    """The learner's log-probabilities; empty if they are not known, or for tokens that are not trained."""
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ShownBranch:
    """A further branch of an episode: what it repeats of an earlier one, what its program put after that, its own turns."""

    text: str
    parent: int
    """Number of the branch, from 1, that it shares its longest beginning with."""
    shared: tuple[Stretch, ...]
    """Tokens of that beginning; those that were sampled are trained in the parent."""
    context: tuple[Stretch, ...]
    """The rest of its prompt, such as a history that was rewritten; not trained here."""
    stretches: tuple[Stretch, ...]


class Tokenizer:
    """A run's tokenizer, loaded at first use from files that are already on this machine."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._lock = run, threading.Lock()
        self._decode: Decode | None = None
        self.problem = ""
        """The reason why there is none; "" while none was needed or it was loaded."""

    def decoder(self) -> Decode | None:
        """Return the function from ids to text, or None; `problem` says why then."""
        with self._lock:
            if self._decode is None and not self.problem:
                try:
                    self._decode = _load(self._run)
                except LockstepError as error:
                    self.problem = f"{error.what}: tokens are not shown one by one"
            return self._decode


def stretches(row: RolloutRow | Branch, decode: Decode) -> list[Stretch]:
    """Split a reply into what the policy sampled and what it was told."""
    texts = pieces(row.ids, decode)
    found, seen = [], 0
    learned = (row.learner_logprobs, row.entropies) if isinstance(row, RolloutRow | StoredBranch) else ((), ())
    for sampled, a, b in spans(row.trained):
        own = slice(seen, seen + b - a) if sampled else slice(0)
        seen += b - a if sampled else 0
        logprobs, entropies = (values[own] for values in learned)
        found.append(Stretch(sampled, tuple(texts[a:b]), row.logprobs[a:b], logprobs, entropies))
    return found


def shown_branches(row: RolloutRow, decode: Decode) -> list[ShownBranch]:
    """Return the branches of an episode after the first, each set against those before it."""
    rows = [Branch(row.prompt_ids, row.ids, row.logprobs, row.trained, row.text), *row.branches]
    wholes = [(*one.prompt_ids, *one.ids) for one in rows]
    found = []
    for number, one in enumerate(row.branches, 1):
        same = [alike(one.prompt_ids, whole) for whole in wholes[:number]]
        parent, count = same.index(max(same)), max(same)
        start, rest = len(rows[parent].prompt_ids), one.prompt_ids[count:]
        logprobs = ((0.0,) * start + rows[parent].logprobs)[:count]
        shared = Branch((), one.prompt_ids[:count], logprobs, ((False,) * start + rows[parent].trained)[:count])
        context = Branch((), rest, (0.0,) * len(rest), (False,) * len(rest))
        parts = (tuple(stretches(part, decode)) for part in (shared, context, one))
        found.append(ShownBranch(one.text, parent + 1, *parts))
    return found


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token. Tokens that end inside a character are "", the one that completes it has its text."""
    found: list[str] = []
    clean = 0
    for end in range(1, len(ids) + 1):
        start = max(0, clean - LEAD)
        text, before = decode(ids[start:end]), decode(ids[start:clean])
        if text.endswith(BROKEN) and end < len(ids) and end - clean < LEAD:
            found.append("")
            continue
        found.append(text[len(before) :] if text.startswith(before) else decode(ids[clean:end]))
        clean = end
    return found


def _load(run: RunDirectory) -> Decode:
    """Load the tokenizer's file, which is data: nothing is fetched, and no code of a model's folder runs. Raises ModelError."""
    from tokenizers import Tokenizer as Loaded

    path = _file(load([str(run.recipe_path)]).model)
    try:
        tokenizer = Loaded.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"the run's tokenizer cannot be read at {path}",
            where=str(run.path),
            fix="put the folder of the model back",
        ) from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _file(model: Model) -> Path:
    """Return where the tokenizer is, if it is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    folder = builtin_place(model.path) if model.path in BUILTINS else Path(model.path).expanduser()
    if folder.is_dir() or not HUB_ID.fullmatch(model.path):
        return folder / TOKENIZER
    found = try_to_load_from_cache(model.path, TOKENIZER, revision=model.revision)
    return Path(found) if isinstance(found, str) else folder / TOKENIZER
