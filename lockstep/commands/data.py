"""`lockstep data`: checks, measures, shows, builds and splits data sets. Imports torch only to count tokens."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.commands.eval import positive
from lockstep.config.data import FILE_SUFFIXES, Data
from lockstep.config.load import built_in, load
from lockstep.errors import ChatError, ConfigError, DataError, LockstepError

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe
    from lockstep.data.build import Names, Part
    from lockstep.data.sets import DataSet, Loaded

_TARGET = """a recipe, or a source: hub id, hf:// path, .parquet, .jsonl, .json or .csv file, folder, file.py:generator, or
a preset's name; after it settings: of the recipe (task.data.max_rows=100), or of the source (prompt=question); options come
last"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `data check|stats|show|build|split|filters|presets`."""
    parser = subparsers.add_parser("data", help="check, measure, show, build and split data sets")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="read every row: bad rows, filters, answers, overlap (exit 4 if not fit to train)"
    )
    stats = actions.add_parser("stats", help="prompt lengths in tokens, distinct prompts, what filters dropped")
    show = actions.add_parser("show", help="print rows as they are asked, or as they are trained on (--mask)")
    build = actions.add_parser("build", help="write the filtered sets as files, with a manifest")
    split = actions.add_parser("split", help="divide the training rows by hash into files, with a manifest")
    for action in (check, stats, show, build, split):
        action.add_argument("target", nargs="+", metavar="TARGET|KEY=VALUE", help=_TARGET)
    for action in (check, stats, build):
        action.add_argument(
            "--against",
            action="append",
            default=[],
            metavar="SOURCE",
            help="also compare with this evaluation set, of which {source: …, prompt: …} names the columns; again for more",
        )
    stats.add_argument("--limit", type=int, metavar="N", help="count prompts of more than N tokens")
    show.add_argument("-n", type=positive, default=3, metavar="N", help="how many rows (default 3)")
    show.add_argument("--row", type=int, metavar="N", help="this row alone")
    show.add_argument("--mask", action="store_true", help="as the chat format tokenises it, trained tokens marked")
    for action in (build, split):
        action.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
        action.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="default jsonl")
        action.add_argument(
            "--prompt-name", metavar="COLUMN", help="column of the question (default: its name in the source)"
        )
        action.add_argument(
            "--answer-name", metavar="COLUMN", help="column of the answer (default: its name in the source)"
        )
    split.add_argument(
        "--parts",
        type=_parts,
        required=True,
        metavar="NAME=N,…",
        help="sizes in order; the last may be NAME=rest: test=500,train=rest",
    )
    split.add_argument("--seed", type=int, default=0, metavar="N", help="another split (default 0)")
    actions.add_parser("filters", help="list the filters and their settings")
    actions.add_parser("presets", help="list the known data sets")


def run(args: argparse.Namespace) -> int:
    """Do it. Raises ConfigError for a target that is neither, DataError for data that cannot be read."""
    from lockstep.data import text

    match args.action:
        case "filters":
            print(text.filter_table())
            return 0
        case "presets":
            print(text.preset_table())
            return 0
    from lockstep.data.sets import sets_of

    recipe = recipe_of(args.target)
    sets = list(sets_of(recipe))
    sets += _against(getattr(args, "against", []), sets)
    match args.action:
        case "check":
            return _check(sets)
        case "stats":
            return _stats(recipe, sets, args.limit)
        case "show":
            return _show(recipe, sets[0], args)
        case "build":
            return _build(sets, args)
        case _:
            return _split(sets[0], args)


def recipe_of(words: list[str]) -> Recipe:
    """Return the recipe that is named, or one whose task reads the source that is named. Raises ConfigError."""
    target, *overrides = words
    if target in built_in() or target.lower().endswith((".yaml", ".yml")):
        return load(words)
    own = set(Data.model_fields)
    mapped = [f"task.data.{word}" if re.split(r"[.=]", word)[0] in own else word for word in overrides]
    return load(["task.kind=file", f"task.data.source={json.dumps(target)}", *mapped])


def _against(sources: list[str], sets: list[DataSet]) -> list[DataSet]:
    from lockstep.data.load import AGAINST
    from lockstep.data.sets import DataSet

    same = all(one.verifier == sets[0].verifier for one in sets)
    found: list[DataSet] = []
    for number, source in enumerate(sources, start=1):
        data = _columns_of_target(_data(source), sets[0].data)
        label = data.source.rstrip("/").rpartition("/")[2]
        stem = next((label.removesuffix(suffix) for suffix in FILE_SUFFIXES if label.endswith(suffix)), label)
        name = stem or f"against_{number}"
        while name in {one.name for one in (*sets, *found)}:  # it names the set's file and its rows of the table
            name += f"_{number}"
        verifier = sets[0].verifier if same else None
        found.append(DataSet(name, "evaluation", f"{AGAINST} {data.source}", data, False, verifier))
    return found


def _data(source: str) -> Data:
    """Return the source that --against names: a text, or a mapping {source: …, prompt: …}. Raises ConfigError."""
    from pydantic import ValidationError

    from lockstep.config.text import parse

    try:
        return Data.model_validate(parse(source, "").value if source.startswith("{") else {"source": source})
    except ValidationError as error:
        first = error.errors()[0]
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            what = f"no setting of a source; known are {', '.join(Data.model_fields)}"
        at = "".join(f"{part}: " for part in first["loc"])
        raise ConfigError([f"--against {source}: {at}{what}"]) from error


def _columns_of_target(data: Data, target: Data) -> Data:
    """Return the data with the columns that the target's settings name, if its first row has them and it names none itself."""
    from lockstep.data.columns import BadRow, columns_of, value_at
    from lockstep.data.load import open_rows
    from lockstep.data.presets import preset_of

    names = ("prompt", "answer", "extract")
    given = {name: getattr(target, name) for name in names if getattr(target, name) is not None}
    if not given or preset_of(data) or any(getattr(data, name) is not None for name in (*names, "messages")):
        return data
    same = data.model_copy(update=given)
    columns = columns_of(same)
    try:
        row = next(iter(open_rows(same.model_copy(update={"on_bad_row": "drop"}), where="--against")))
        value_at(row.values or {}, columns.prompt)
        value_at(row.values or {}, columns.answer)
    except (BadRow, DataError, StopIteration):  # what is wrong with the data is said when all of it is read
        return data
    return same


def _parts(value: str) -> list[Part]:
    from lockstep.data.build import Part

    parts = []
    for word in value.split(","):
        name, _, size = word.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or not (size == "rest" or size.isdecimal()):
            raise argparse.ArgumentTypeError(f"{word!r} is not NAME=N or NAME=rest")
        parts.append(Part(name, None if size == "rest" else int(size)))
    if len({part.name for part in parts}) < len(parts):
        raise argparse.ArgumentTypeError("two parts have the same name")
    return parts


def _check(sets: list[DataSet]) -> int:
    """Report on every set, whatever is wrong with the others."""
    from lockstep.data import text
    from lockstep.data.sets import load_set, overlaps

    loaded: list[Loaded] = []
    problems: list[str] = []
    for one in sets:
        try:
            ready = load_set(one, whole=True)
        except DataError as error:
            problems.append(str(error))
            print(f"{one.where}: not fit\n")
            continue
        loaded.append(ready)
        print(text.set_report(ready) + "\n")
        problems += _references(ready)
    found = overlaps(loaded)
    if found:
        print(text.overlap_table(found) + "\n")
    problems += [
        f"{o.normalised} of {o.items} questions of {o.evaluation} are also in {o.train}" for o in found if o.normalised
    ]
    print("\n".join(f"problem: {problem}" for problem in problems) if problems else "ok: fit to train")
    return DataError.exit_code if problems else 0


def _references(ready: Loaded) -> list[str]:
    """Return why the set's verifier cannot grade the answers; conversations have none."""
    from lockstep.tasks.base import check_references
    from lockstep.verifiers.build import build_verifier

    if ready.set.verifier is None:
        return []
    try:
        check_references(build_verifier(ready.set.verifier), ready.prompts, f"{ready.set.where} = {ready.rows.origin}")
    except LockstepError as error:
        return [str(error)]
    return []


def _stats(recipe: Recipe, sets: list[DataSet], limit: int | None) -> int:
    from lockstep.data import text
    from lockstep.data.sets import load_set, overlaps
    from lockstep.data.stats import lengths, repeats
    from lockstep.export.prompt import chat_format

    chat = chat_format(recipe)
    loaded = [load_set(one, whole=True) for one in sets]
    for ready in loaded:
        found = lengths(ready.prompts, lambda prompt: len(chat.render_prompt(prompt)), limit)
        print(text.set_report(ready))
        print(text.lengths_text(found, repeats(ready.prompts), limit, recipe.model.path) + "\n")
    if found_overlaps := overlaps(loaded):
        print(text.overlap_table(found_overlaps))
    return 0


def _show(recipe: Recipe, one: DataSet, args: argparse.Namespace) -> int:
    from lockstep.data import text
    from lockstep.data.columns import BadRow, to_conversation, to_prompt
    from lockstep.data.load import open_rows
    from lockstep.export.prompt import chat_format

    rows = open_rows(one.data.model_copy(update={"on_bad_row": "drop"}), where=one.where, whole=one.whole)
    if args.mask and recipe.loop == "rl":
        print(
            "loop = rl trains on sampled replies; marked is what supervised fine-tuning on these answers would train\n"
        )
    chat = chat_format(recipe) if args.mask else None
    last_only = recipe.sft is None or recipe.sft.train_on == "last"
    shown = 0
    for row in rows:
        if args.row not in (None, row.number):
            continue
        values = row.values or {}
        try:
            if chat is not None:
                print(text.masked(row, to_conversation(values, rows.columns), chat, last_only=last_only))
            elif one.chats:
                print(text.conversation(row, to_conversation(values, rows.columns)))
            else:
                print(text.question(row, to_prompt(values, f"{rows.name}/{row.number}", rows.name, rows.columns)))
        except (BadRow, ChatError) as error:
            print(text.unusable(row, error))
        except RecursionError:
            print(text.unusable(row, BadRow("its values are nested too deep")))
        shown += 1
        if args.row is not None or shown == args.n:
            break
    if not shown:
        what = "there are no rows, or filters drop all of them"
        if args.row is not None:
            what = f"there is no row {args.row}, or a filter drops it"
        raise DataError(what, where=rows.origin, fix="give another --row, or remove the filters")
    return 0


def _build(sets: list[DataSet], args: argparse.Namespace) -> int:
    from lockstep.data import text
    from lockstep.data.build import build
    from lockstep.data.sets import load_set

    loaded = [load_set(one) for one in sets]
    names = _names(sets[0], args)
    manifest = build(loaded, args.out, args.format, names)
    print("\n\n".join([*map(text.set_report, loaded), text.built(manifest, args.out)]))
    return 0


def _split(one: DataSet, args: argparse.Namespace) -> int:
    from lockstep.data import text
    from lockstep.data.build import split_set
    from lockstep.data.sets import load_set

    loaded = load_set(one)
    names = _names(one, args)
    manifest = split_set(loaded, args.parts, args.out, args.seed, args.format, names)
    recipe = text.recipe_snippet(manifest, args.out, names)
    print("\n\n".join([text.set_report(loaded), text.built(manifest, args.out), recipe]))
    return 0


def _names(one: DataSet, args: argparse.Namespace) -> Names:
    """Return the columns of what is written: as asked, else as in the source, so that its recipe suits the parts too."""
    from lockstep.data.build import Names
    from lockstep.data.columns import columns_of

    columns = columns_of(one.data)
    plain = [name if re.fullmatch(r"\w+", name) else "" for name in (columns.prompt, columns.answer)]
    prompt, answer = args.prompt_name or plain[0] or "prompt", args.answer_name or plain[1] or "answer"
    return Names(prompt, answer if answer != prompt else "answer")
