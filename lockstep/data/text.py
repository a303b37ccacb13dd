"""Prints the output of `lockstep data`, with control characters escaped."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.data import FILTERS
from lockstep.config.section import meanings
from lockstep.config.text import to_line
from lockstep.data.columns import tools_of
from lockstep.track.text import block, one_line, plain_table, visible

if TYPE_CHECKING:
    from lockstep.chat.chat import ChatFormat
    from lockstep.data.build import Manifest, Names
    from lockstep.data.filters import Stage
    from lockstep.data.overlap import Overlap
    from lockstep.data.sets import Loaded
    from lockstep.data.sources import Row
    from lockstep.data.stats import Lengths, Repeats
    from lockstep.types import Message, Prompt

WIDTH = 116


def set_report(loaded: Loaded) -> str:
    """Return the report of a set: its source, the rows read, and the rows that each filter dropped."""
    from lockstep.data.stats import repeats

    rows, reading = loaded.rows, loaded.rows.reading
    counts = repeats(loaded.prompts)
    until = "" if reading.whole else f" (the reading ended at max_rows = {rows.data.max_rows})"
    lines = [
        f"{loaded.set.where}: {one_line(rows.origin)}",
        f"  {reading.read} rows read, {reading.bad} bad, {reading.kept} kept{until}; "
        f"{counts.distinct} distinct questions; content {rows.content_hash}",
    ]
    lines += [f"  bad: {one_line(problem, WIDTH)}" for problem in reading.problems]
    if counts.conflicting:
        lines.append(f"  {counts.conflicting} questions come with more than one answer")
    if reading.stages:
        lines += textwrap.indent(stage_table(reading.stages), "  ").splitlines()
    return "\n".join(lines)


def stage_table(stages: Sequence[Stage]) -> str:
    """Return the counts of each filter, and five rows that it dropped."""
    cells = [[s.name, s.kind, str(s.before), str(s.dropped), str(s.after)] for s in stages]
    lines = [plain_table("", ["filter", "kind", "before", "dropped", "after"], cells)]
    for stage in stages:
        if stage.examples:
            lines.append(f"{stage.name} drops, among others:")
        for e in stage.examples:
            seen = f"{e.looked_at} | {e.question}" if e.looked_at else e.question
            lines.append(f"  {one_line(f'{e.place}: {seen}', WIDTH)}")
    return "\n".join(lines)


def overlap_table(found: Sequence[Overlap]) -> str:
    """Return the table of evaluation questions that training has too, for every train set and evaluation set."""
    cells = [[o.train, o.evaluation, *map(str, (o.items, o.exact, o.normalised, o.ngram))] for o in found]
    title = "evaluation questions that training has too: same text, same but for spacing and case, 13 words in a row"
    lines = [plain_table(title, ["train", "evaluation", "items", "exact", "normalised", "13-gram"], cells)]
    lines += [
        f"  {one_line(f'{o.evaluation}: {held} = {trained} of {o.train}', WIDTH)}"
        for o in found
        for trained, held in o.pairs
    ]
    return "\n".join(lines)


def lengths_text(found: Lengths, counts: Repeats, limit: int | None, model: str) -> str:
    """Return the percentiles of the prompts' lengths."""
    cells = [
        [("shortest" if p == 0 else "longest" if p == 100 else f"p{p}"), str(tokens)] for p, tokens in found.percentiles
    ]
    title = f"prompt tokens with the chat format of {one_line(model)}: mean {found.mean:.1f}, {found.total} together"
    lines = [plain_table(title, ["of the prompts", "tokens"], cells), f"the longest is {one_line(found.longest, 60)}"]
    if limit is not None:
        lines.append(f"{found.too_long} of {counts.prompts} prompts are longer than {limit} tokens")
    lines.append(
        f"{counts.distinct} distinct questions among {counts.prompts} prompts (the commonest comes {counts.most} times), "
        f"{counts.answers} different answers"
    )
    return textwrap.indent("\n".join(lines), "  ")


def question(row: Row, prompt: Prompt) -> str:
    """Return a row as it is asked, with its answer."""
    lines = [_head(row), *(block(turn["role"], turn["content"]) for turn in prompt.messages)]
    lines.append(block("answer", prompt.answer))
    lines += [f"   {one_line(name, 20)} = {one_line(repr(value), 80)}" for name, value in prompt.data.items()]
    return "\n".join(lines)


def conversation(row: Row, turns: Sequence[Message]) -> str:
    """Return a row as a chat."""
    return "\n".join([_head(row), *(block(turn["role"], turn["content"]) for turn in turns)])


def masked(row: Row, turns: Sequence[Message], chat: ChatFormat, *, last_only: bool) -> str:
    """Return a row as its tokens; lines with + are trained, those with | are not. Tokens are parted by ·.

    Raises ChatError.
    """
    ids, trained = chat.trained_mask(turns, last_only=last_only, tools=tools_of(row.values or {}))
    lines = [f"{_head(row)} · {len(ids)} tokens, {sum(trained)} trained"]
    current: list[str] = []
    for index, (token, on) in enumerate(zip(ids, trained, strict=True)):
        text = chat.shown([token])
        current.append(visible(text).replace("\n", "⏎").replace("\t", "⇥"))
        if index + 1 == len(ids) or trained[index + 1] != on or "\n" in text:
            lines.append(f"   {'+' if on else '|'} {'·'.join(current)}")
            current = []
    return "\n".join(lines)


def unusable(row: Row, error: Exception) -> str:
    """Return the line of a row that is neither prompt nor chat."""
    return f"{_head(row)} · cannot be used: {one_line(str(error), 200)}"


def built(manifest: Manifest, folder: Path) -> str:
    """Return the table of the files that were written."""
    cells = [[o.file.file, str(o.rows), str(o.file.bytes), o.file.sha256[:16]] for o in manifest.outputs]
    lines = [plain_table(f"written to {folder}, with manifest.json", ["file", "rows", "bytes", "sha256"], cells)]
    if division := manifest.division:
        lines.append(
            f"{division.distinct} distinct questions dealt by hash (seed {division.seed}); {division.repeats} repeats and "
            f"{division.unused} questions left out"
        )
    return "\n\n".join([*lines, *([overlap_table(manifest.overlap)] if manifest.overlap else [])])


def recipe_snippet(manifest: Manifest, folder: Path, names: Names) -> str:
    """Return a recipe that reads the parts of a split: the largest is trained on, the first other one is held out."""
    columns = (("prompt", names.prompt), ("answer", names.answer))
    own = {setting: name for setting, name in columns if name != setting}
    parts = sorted(manifest.outputs, key=lambda output: (output.part != "train", -output.rows))
    data = [to_line({"source": str(folder / part.file.file)} | own) for part in parts[:2]]
    lines = ["in a recipe:", "task:", "  kind: file", f"  data: {data[0]}"]
    lines += [f"  heldout: {{id_probe: {one}}}" for one in data[1:]]
    return "\n".join(lines)


def filter_table() -> str:
    """Return every filter with its settings."""
    lines = []
    for section in FILTERS:
        lines.append(f"{section.model_fields['kind'].default}: {one_line(inspect.cleandoc(section.__doc__ or ''))}")
        for name, field in section.model_fields.items():
            if name == "kind":
                continue
            default = field.get_default(call_default_factory=True)
            shown = "required" if field.is_required() else _default(default)
            lines.append(
                f"    {name:<10} {shown:<24} {one_line(meanings(section).get(name, 'how answers are graded'))}"
            )
    return "\n".join(lines)


def preset_table() -> str:
    """Return every known data set."""
    from lockstep.data.presets import PRESETS

    lines = []
    for preset in PRESETS.values():
        place = "/".join(part for part in (preset.subset, preset.split) if part)
        how = {"text": "", "after_hashes": " (what follows ####)", "last_boxed": " (its last box)"}[preset.extract]
        lines.append(f"{preset.name}: {preset.source} {place}; {preset.about}")
        lines.append(f"    question in {preset.prompt}, answer in {preset.answer}{how}, sft learns {preset.response}")
    return "\n".join(lines)


def _default(value: object) -> str:
    return f"kind: {value.kind}" if hasattr(value, "kind") else json.dumps(value)


def _head(row: Row) -> str:
    return f"── row {row.number} · {one_line(row.file.name, 60)}:{row.place}"
