"""Turn conversations, or another run's replies, into the sequences that SFT trains on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.build.parts import Parts
from lockstep.chat.chat import ChatFormat
from lockstep.config.load import load_mapping
from lockstep.config.schema import Recipe
from lockstep.config.sft import Rollouts, Sft
from lockstep.data.load import open_rows
from lockstep.data.order import batch_indices
from lockstep.data.questions import question_digest
from lockstep.errors import ChatError, DataError
from lockstep.seeds import seed_for
from lockstep.track.rollouts import RolloutRow, read_rollouts, rollout_steps
from lockstep.track.rundir import RunDirectory
from lockstep.types import Batch, Message, Metrics, Prompt, TokenIds, TrainSequence, spans

SHOWN = 5
PROGRAMS = {"agent", "verifiers"}
"""Kinds of tasks whose programs write the prompts themselves."""
PREFIX_SHARE = 0.125
"""Smallest share of a mean row at which a prefix common to all rows is processed once for all."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A reply as the engine of another run returned it."""

    prompt_ids: TokenIds
    ids: TokenIds
    trained: tuple[bool, ...]
    template_hash: str
    """Hash of the chat format that the prompt was rendered with."""
    whole: bool
    """True if prompt and reply can be rendered again: a question and one reply, not an episode of a program or of more turns."""


@dataclass(frozen=True, slots=True)
class Given:
    """A question with its reply, before tokenisation."""

    id: str
    messages: tuple[Message, ...]
    sampled: Sampled | None = None
    """The sampled ids, if the reply is from another run."""
    tools: str = ""
    """Functions that its replies may call."""

    @property
    def question(self) -> bytes:
        return question_digest(self.messages[:-1])


@dataclass(frozen=True, slots=True)
class Material:
    """Rows as read from the source, before a model is loaded."""

    train: tuple[Given, ...]
    validation: tuple[Given, ...]
    origin: str
    content_hash: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SftRows:
    """Rows as the learner takes them. Weights are set when a batch is made."""

    train: tuple[TrainSequence, ...]
    validation: tuple[TrainSequence, ...]
    prefix: int
    """Number of leading tokens that all training rows share, processed once per micro-batch."""
    dropped: int
    truncated: int
    notes: tuple[str, ...]


# --- reading --------------------------------------------------------------------------------------------------------
def read_material(recipe: Recipe) -> Material:
    """Return all rows of an SFT recipe, split by question. Raises DataError, or RunDirectoryError for a run without rollouts."""
    sft = settings_of(recipe)
    if sft.data is not None:
        rows = open_rows(sft.data, where="sft.data")
        given = [Given(one.id, tuple(one.messages), tools=one.tools) for one in rows.conversations()]
        origin, content_hash = rows.origin, rows.content_hash
        notes = [f"{len(given)} rows from {origin}"]
    else:
        assert sft.rollouts is not None  # the section has one of the two
        given, notes = read_replies(sft.rollouts)
        origin, content_hash = sft.rollouts.run, ""
    if sft.validation is not None:
        held = open_rows(sft.validation, where="sft.validation")
        validation = [Given(one.id, tuple(one.messages), tools=one.tools) for one in held.conversations()]
        train, repeated = _apart(given, {one.question for one in validation})
    else:
        train, validation, repeated = _held_out(given, sft.validation_rows)
    if repeated:
        notes.append(f"{repeated} rows repeat a question of the validation set and are left out")
    size = sft.sequences_per_step
    if len(train) < size:
        left = f"; {repeated} more repeat a question of the validation set" if repeated else ""
        what = f"there are {len(train)} rows to train on, but one step needs {size}{left}"
        other = "sft.validation_rows" if sft.validation is None else "give other rows as sft.validation"
        raise DataError(what, where=origin, fix=f"lower sft.sequences_per_step or {other}")
    epochs = recipe.steps / (len(train) // size)  # as sft.epochs counts them: rows that fill no step are left out
    notes.append(
        f"{len(train)} rows are trained on, {len(validation)} validate; an epoch is {len(train) // size} steps of {size} rows, "
        f"the run {epochs:.3g} epochs"
    )
    return Material(tuple(train), tuple(validation), origin, content_hash, tuple(notes))


def with_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with the number of steps that its sft.epochs mean for its rows. Raises the errors of `read_material`,
    and ConfigError if the schedule does not fit this number of steps.
    """
    if recipe.sft is None or recipe.sft.epochs is None:
        return recipe
    count = len(read_material(recipe).train)
    steps = max(1, round(recipe.sft.epochs * (count // recipe.sft.sequences_per_step)))
    tree = recipe.model_dump(mode="json")
    tree["steps"], tree["sft"]["epochs"] = steps, None
    return load_mapping(tree, where=f"{recipe.name} with the {steps} steps of {recipe.sft.epochs:g} epochs")


def read_replies(settings: Rollouts) -> tuple[list[Given], list[str]]:
    """Return the usable replies of a run, latest first, and lines about those left out. Raises RunDirectoryError, DataError."""
    run = RunDirectory.open(settings.run)
    stored = rollout_steps(run)
    steps = [step for step in stored if step >= settings.first_step]
    if stored and not steps:
        what = f"sft.rollouts.first_step={settings.first_step}, but the last step with replies is {stored[-1]}"
        raise DataError(what, where=settings.run, fix=f"set sft.rollouts.first_step to {stored[-1]} or less")
    template_hash = str(run.manifest().get("template_hash", ""))
    task = run.settings().get("task") or {}
    parts = [one["task"] for one in task["tasks"].values()] if task.get("kind") == "mixed" else [task]
    programs = any(one.get("kind") in PROGRAMS for one in parts)
    rows = [row for step in reversed(steps) for row in read_rollouts(run, step)]
    fit = [
        row for row in rows if row.finish == "stop" and row.right is not None and (row.right or settings.keep == "all")
    ]
    taken: dict[str, list[RolloutRow]] = {}
    for row in fit:
        kept = taken.setdefault(row.prompt_id, [])
        if len(kept) < settings.per_prompt and all(row.ids != other.ids for other in kept):
            kept.append(row)
    given = [
        Given(
            f"{row.prompt_id}/{number}",
            (*row.messages, Message(role="assistant", content=row.text)),
            Sampled(part.prompt_ids, part.ids, part.trained, template_hash, not programs and all(part.trained)),
            row.tools,
        )
        for kept in taken.values()
        for number, row in enumerate(kept)
        for part in row.rows
    ]
    which = "correct" if settings.keep == "right" else "scored"
    if not given:
        what = f"none of the run's {len(rows)} replies can be trained on: none is {which} and finished"
        fix = "choose another run" + (", or set sft.rollouts.keep=all" if settings.keep == "right" else "")
        raise DataError(what, where=settings.run, fix=fix)
    note = (
        f"{len(given)} replies of {settings.run}, steps {steps[0]} to {steps[-1]}: of {len(rows)} sampled ones {len(fit)} are "
        f"{which} and finished; at most {settings.per_prompt} different ones of each of {len(taken)} questions are taken"
    )
    return given, [note]


def _held_out(given: Sequence[Given], count: int) -> tuple[list[Given], list[Given], int]:
    """Hold out the first `count` questions by hash, one row each. Returns training rows, these, and the number of other rows of
    held-out questions.
    """
    first: dict[bytes, Given] = {}
    for one in given:
        first.setdefault(one.question, one)
    if count >= len(first):
        what = f"{count} questions are needed for validation, but there are only {len(first)} different ones"
        raise DataError(
            what, where="sft.validation_rows", fix="lower sft.validation_rows; with 0 no validation loss is measured"
        )
    held = sorted(first)[:count]
    train, left = _apart(given, set(held))
    return train, [first[question] for question in held], left - count


def _apart(given: Sequence[Given], held: set[bytes]) -> tuple[list[Given], int]:
    train = [one for one in given if one.question not in held]
    return train, len(given) - len(train)


def refuse_asked(material: Material, heldout: Iterable[Prompt]) -> None:
    """Raise DataError if a training row has a question of the task's held-out set: the score would measure memorised answers."""
    asked = {question_digest(prompt.messages): prompt.id for prompt in heldout}
    both = [(one.id, asked[one.question]) for one in material.train if one.question in asked]
    if both:
        names = "; ".join(f"{row} = {prompt}" for row, prompt in both[:SHOWN])
        raise DataError(
            f"{len(both)} training rows ask a held-out question of the task: {names}",
            where=material.origin,
            fix="remove these rows, or evaluate on other questions",
        )


# --- tokens ---------------------------------------------------------------------------------------------------------
def tokenised(material: Material, chat: ChatFormat, sft: Sft, context: int | None) -> SftRows:
    """Turn all rows into ids and masks. Raises DataError for rows that are too long or not a chat; it names the first few."""
    limit = sft.max_tokens
    if context is not None and context < limit:
        what = f"sft.max_tokens={limit} is more than the model's context of {context} tokens"
        raise DataError(what, where="sft.max_tokens", fix=f"set sft.max_tokens to {context} or less")
    maker = _Maker(chat, sft)
    train, validation = maker.all(material.train), maker.all(material.validation)
    if maker.wrong:
        raise DataError(
            f"{len(maker.wrong)} rows cannot be trained on: {'; '.join(maker.wrong[:SHOWN])}",
            where=material.origin,
            fix="correct these rows"
            + (", or set sft.too_long=drop or sft.too_long=truncate" if maker.long and sft.too_long == "stop" else ""),
        )
    if len(train) < sft.sequences_per_step:
        what = f"one step needs {sft.sequences_per_step} rows, but {len(train)} are left; {maker.dropped} were too long"
        raise DataError(what, where=material.origin, fix="raise sft.max_tokens or lower sft.sequences_per_step")
    if material.validation and not validation:
        raise DataError(
            f"none of the {len(material.validation)} validation rows fits into sft.max_tokens={limit}, so no validation loss "
            "could be measured",
            where="sft.validation" if sft.validation is not None else material.origin,
            fix="raise sft.max_tokens, give shorter validation rows, or set sft.validation_rows=0 and no sft.validation",
        )
    prefix = min(chat.shared_prefix(one.prompt_ids) for one in train)
    tokens = sum(len(one.prompt_ids) + len(one.ids) for one in train)
    if prefix < PREFIX_SHARE * tokens / len(train):
        prefix = 0
    carrying = sum(sum(one.trained) for one in train)
    notes = [
        f"{tokens} tokens an epoch, of which {carrying} ({carrying / tokens:.0%}) carry loss: sft.train_on={sft.train_on}"
    ]
    if maker.dropped or maker.truncated:
        notes.append(
            f"longer than sft.max_tokens={limit}: {maker.dropped} rows dropped, {maker.truncated} truncated (sft.too_long)"
        )
    if maker.verbatim or maker.again:
        why = ": their run had another chat template, system text, examples or tokenizer" if maker.again else ""
        notes.append(
            f"{maker.verbatim} replies have the ids that were sampled, {maker.again} were tokenised again{why}"
        )
    return SftRows(tuple(train), tuple(validation), prefix, maker.dropped, maker.truncated, tuple(notes))


class _Maker:
    """Makes sequences and counts what could not be made."""

    def __init__(self, chat: ChatFormat, sft: Sft) -> None:
        self._chat, self._sft = chat, sft
        self._groups: dict[TokenIds, int] = {}
        self.wrong: list[str] = []
        self.long, self.dropped, self.truncated, self.verbatim, self.again = 0, 0, 0, 0, 0

    def all(self, given: Iterable[Given]) -> list[TrainSequence]:
        found = (self._one(one) for one in given)
        return [one for one in found if one is not None]

    def _one(self, given: Given) -> TrainSequence | None:
        try:
            ids, trained = self._ids(given)
        except ChatError as error:
            self.wrong.append(f"{given.id}: {error.what}")
            return None
        if len(ids) > self._sft.max_tokens:
            return self._too_long(given, ids, trained)
        return self._sequence(ids, trained)

    def _ids(self, given: Given) -> tuple[TokenIds, tuple[bool, ...]]:
        """Return the ids up to the last token with loss; what a template writes after it is not trained."""
        sampled = given.sampled
        if sampled is not None and sampled.template_hash == self._chat.template_hash:
            self.verbatim += 1
            return sampled.prompt_ids + sampled.ids, (False,) * len(sampled.prompt_ids) + sampled.trained
        if sampled is not None:
            if not sampled.whole:
                raise ChatError(
                    "an episode of several turns, or of a program, cannot be tokenised again for another chat format",
                    fix="use the chat settings of the run that sampled it",
                )
            self.again += 1
        ids, trained = self._chat.trained_mask(
            given.messages, last_only=self._sft.train_on == "last", tools=given.tools
        )
        end = max((i + 1 for i, on in enumerate(trained) if on), default=0)
        return ids[:end], trained[:end]

    def _too_long(self, given: Given, ids: TokenIds, trained: tuple[bool, ...]) -> TrainSequence | None:
        self.long += 1
        limit = self._sft.max_tokens
        match self._sft.too_long:
            case "stop":
                self.wrong.append(f"{given.id}: {len(ids)} tokens, more than sft.max_tokens={limit}")
                return None
            case "truncate" if any(trained[:limit]):
                self.truncated += 1
                return self._sequence(ids[:limit], trained[:limit])
            case _:  # dropped; or truncation would leave nothing of its reply
                self.dropped += 1
                return None

    def _sequence(self, ids: TokenIds, trained: tuple[bool, ...]) -> TrainSequence:
        start = trained.index(True)
        prompt = ids[:start]
        group = self._groups.setdefault(prompt, len(self._groups))
        return TrainSequence(prompt, ids[start:], trained[start:], (), (), 0.0, group)


def preview(rows: SftRows, chat: ChatFormat) -> str:
    """Return the first training row as text, special tokens shown, the parts with loss between ⟦ and ⟧."""
    one = rows.train[0]
    on = (False,) * len(one.prompt_ids) + one.trained
    parts, ids = [], one.prompt_ids + one.ids
    for carries, start, end in spans(on):
        text = chat.shown(ids[start:end])
        parts.append(f"⟦{text}⟧" if carries else text)
    return "\n".join(f"| {line}" for line in "".join(parts).split("\n"))


def weighted(sequences: Sequence[TrainSequence], weights: Sequence[float]) -> tuple[TrainSequence, ...]:
    """Return the sequences, each with its share in the loss of a batch."""
    return tuple(replace(one, weight=weight) for one, weight in zip(sequences, weights, strict=True))


def sft_batch(parts: Parts, recipe: Recipe, rows: SftRows, step: int) -> Batch:
    """Return the rows of a step: a function of the recipe and the step alone. Each epoch has its own order."""
    size = settings_of(recipe).sequences_per_step
    chosen = [rows.train[i] for i in batch_indices(step, size, len(rows.train), seed_for(recipe.seed, "sft"))]
    weights = parts.objective.weights([sum(one.trained) for one in chosen], [one.group for one in chosen])
    return Batch(weighted(chosen, weights), prefix=rows.prefix, supervised=True)


def validation_metrics(parts: Parts, rows: SftRows) -> Metrics:
    """Return the mean loss per trained token over the validation rows, under the current weights."""
    logprobs = parts.learner.response_logprobs(rows.validation, 1.0)
    tokens = sum(sum(one.trained) for one in rows.validation)
    mean = sum(map(sum, logprobs)) / tokens
    return {"validation/loss": -mean, "validation/logprob": mean, "validation/tokens": float(tokens)}


def validation_steps(recipe: Recipe) -> tuple[int, ...]:
    """Return the steps after which the validation loss is measured, among them 0 (the base) and the last one."""
    every = settings_of(recipe).validate_every or recipe.eval.every
    return (0, *range(every, recipe.steps, every), recipe.steps)


def settings_of(recipe: Recipe) -> Sft:
    """Return the section that a recipe with loop = sft must have, by the recipe's own validation."""
    assert recipe.sft is not None
    return recipe.sft
