"""Settings of data: the source (hub data set, files or generator), its columns, and filters that drop rows."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import Field, model_validator

from lockstep.config.section import CodePath, Json, PathText, Section, ShortSection
from lockstep.config.verifier import NumericVerifier, Verifier

FILE_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")

PresetName: TypeAlias = Literal[
    "dapo-math-17k", "aime-2024", "gsm8k", "math", "math-l45", "numinamath-1.5", "apex-shortlist"
]
Extract: TypeAlias = Literal["text", "after_hashes", "last_boxed"]
Match: TypeAlias = Literal["exact", "normalised", "ngram"]


class _Filter(Section):
    """Settings that all filters share."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Its name in the counts; none takes its kind."""


class Among(_Filter):
    """Keep rows whose columns all hold one of the values."""

    kind: Literal["among"] = "among"
    columns: list[str] = Field(min_length=1)
    """The columns."""
    values: list[str | bool | int] = Field(min_length=1)
    """Values allowed in each."""


class NotAmong(_Filter):
    """Drop rows one of whose columns holds one of the values."""

    kind: Literal["not_among"] = "not_among"
    columns: list[str] = Field(min_length=1)
    """The columns."""
    values: list[str | bool | int] = Field(min_length=1)
    """Values allowed in none."""


class Mentions(_Filter):
    """Keep rows whose column contains one of the texts, whatever the case."""

    kind: Literal["mentions"] = "mentions"
    column: str
    """The column."""
    texts: list[str] = Field(min_length=1)
    """The texts."""


class NotMentions(_Filter):
    """Drop rows whose column contains one of the texts, whatever the case."""

    kind: Literal["not_mentions"] = "not_mentions"
    column: str
    """The column."""
    texts: list[str] = Field(min_length=1)
    """The texts."""


def _in_order(one: IntegerAnswer | Length) -> None:
    if one.low is not None and one.high is not None and one.low > one.high:
        raise ValueError(f"low={one.low} is above high={one.high}: no row would be left")


class IntegerAnswer(_Filter):
    """Keep rows whose answer is written as one whole number: 12, -3, $1,234$; not 24/2, 12.0, 12 cm."""

    kind: Literal["integer_answer"] = "integer_answer"
    low: int | None = None
    """Smallest; none for any."""
    high: int | None = None
    """Largest; none for any."""

    @model_validator(mode="after")
    def _some_are_left(self) -> Self:
        _in_order(self)
        return self


class Gradable(_Filter):
    """Keep rows whose boxed answer scores 1 while an empty reply and garbage score 0."""

    kind: Literal["gradable"] = "gradable"
    verifier: Verifier = NumericVerifier()


class Length(_Filter):
    """Keep rows whose question has this many characters."""

    kind: Literal["length"] = "length"
    low: int = Field(default=1, ge=0)
    """Fewest characters."""
    high: int | None = Field(default=None, ge=1)
    """Most characters; none for any."""

    @model_validator(mode="after")
    def _some_are_left(self) -> Self:
        _in_order(self)
        return self


class Tokens(_Filter):
    """Keep rows whose question, as plain text, has at most `high` tokens."""

    kind: Literal["tokens"] = "tokens"
    high: int = Field(ge=1)
    """Most tokens."""
    model: PathText = "smollm2-135m-instruct"
    """Model whose tokenizer counts."""


class Distinct(_Filter):
    """Keep the first row of each question."""

    kind: Literal["distinct"] = "distinct"
    match: Literal["exact", "normalised"] = "normalised"
    """normalised disregards spacing, case and Unicode form."""


class NotIn(_Filter):
    """Drop rows whose question is in other data sets."""

    kind: Literal["not_in"] = "not_in"
    sources: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    """Sources in the form of data.source; their questions are in the column of their presets, else in prompt."""
    preset: PresetName | None = None
    """Columns of local sources."""
    match: Match = "normalised"
    """ngram: they share 13 words in a row."""

    @model_validator(mode="after")
    def _sources_have_a_form(self) -> Self:
        if wrong := next(filter(None, map(wrong_form, self.sources)), ""):
            raise ValueError(wrong)
        return self


class PythonFilter(_Filter):
    """A function from your file that gets a row as a mapping and returns True to keep it."""

    kind: Literal["python"] = "python"
    path: CodePath
    """file.py:function"""


Filter: TypeAlias = Annotated[
    Among
    | NotAmong
    | Mentions
    | NotMentions
    | IntegerAnswer
    | Gradable
    | Length
    | Tokens
    | Distinct
    | NotIn
    | PythonFilter,
    Field(discriminator="kind"),
]
FILTERS: tuple[type[_Filter], ...] = get_args(get_args(Filter)[0])


def stage_name(settings: Filter) -> str:
    """Return the name of a filter in the counts."""
    return settings.name or settings.kind


class Data(ShortSection):
    """Rows. A text is short for its source: `data: openai/gsm8k`."""

    SHORT = "source"

    source: str = Field(min_length=1)
    """A hub id (org/name), an hf:// path, a .parquet, .jsonl, .json or .csv file, a folder of them, file.py:generator, or a
    preset's name."""
    preset: PresetName | None = None
    """Columns and answer format of a known data set; none takes that of the hub id, if it is a known one."""
    subset: str | None = None
    """Configuration of a hub data set, or of a folder laid out like one."""
    split: str | None = None
    """Split of a hub data set, or of a folder laid out like one; none takes the preset's, else train."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Arguments of a generator."""
    prompt: str | None = None
    """Column with the question, as text or messages; none takes the preset's, else prompt. A dot goes into a mapping:
    reward_model.ground_truth."""
    answer: str | None = None
    """Column with the reference answer, or with the response in SFT; none takes the preset's, else answer."""
    extract: Extract | None = None
    """Place of the answer in that column: text is all of it, after_hashes what follows the last ####, last_boxed its last
    \\boxed{…}; none takes the preset's, else text. SFT always takes all of it."""
    messages: str | None = None
    """Column with a whole conversation, instead of prompt and answer."""
    id: str | None = None
    """Column with a unique id; none numbers the rows."""
    keep: list[str] | None = None
    """Other columns that the grader gets in prompt.data; none keeps all."""
    filters: list[Filter] = Field(default_factory=list)
    """Applied in order; each reports how many rows it dropped, and five of them. `lockstep data filters` lists them."""
    max_rows: int | None = Field(default=None, ge=1)
    """Take only this many rows after the filters."""
    on_bad_row: Literal["stop", "drop"] = "stop"
    """stop names the bad rows and refuses; drop counts and reports them."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if wrong := wrong_form(self.source):
            raise ValueError(wrong)
        names = [stage_name(stage) for stage in self.filters]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two filters are called {twice!r}: give them different names")
        if self.messages is not None and (self.prompt is not None or self.answer is not None):
            raise ValueError(
                "messages holds the whole conversation: leave prompt and answer out, or leave messages out"
            )
        text = self.source
        if self.settings and ".py:" not in text:
            raise ValueError("settings are the arguments of a generator (file.py:generator); this source takes none")
        one_file = ".py:" in text or text.startswith("hf://") or text.lower().endswith(FILE_SUFFIXES)
        if one_file and (self.subset is not None or self.split is not None):
            raise ValueError(
                f"subset and split belong to a hub id (org/name) or a folder: leave them out, "
                f"{text} already says which rows are meant"
            )
        if self.revision is not None and (one_file or text.startswith((".", "/", "~"))):
            where = "write hf://datasets/org/name@revision/…" if text.startswith("hf://") else "leave it out"
            raise ValueError(f"revision belongs to a hub id (org/name); {where}")
        return self


_HUB_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)(.*)")
_HUB_FILE = re.compile(r"/(?:resolve|blob|raw|tree)/([\w.-]+)(?:/([^?#]+))?")
_HF = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+(@[^/]+)?(/.*)?")


def wrong_form(source: str) -> str:
    """Return why a text cannot be a source, and the form that was meant; "" if its form is right. Looks only at the text."""
    if page := _HUB_PAGE.fullmatch(source):
        repo, rest = page.groups()
        if (file := _HUB_FILE.match(rest)) and file[2]:
            at = "" if file[1] == "main" else f"@{file[1]}"
            return f"a web page; write hf://datasets/{repo}{at}/{file[2]}"
        return f"a web page; write the hub id {repo}"
    if source.startswith("hf://"):
        if _HF.fullmatch(source):
            return ""
        rest = source.removeprefix("hf://").removeprefix("datasets/").strip("/")
        known = rest if rest.count("/") else "org/name/file.parquet"
        return f"an hf:// path has the form hf://datasets/org/name/file; did you mean hf://datasets/{known}?"
    if source.startswith("file://"):
        return f"write the path alone: {source.removeprefix('file://')}"
    if re.match(r"[A-Za-z][A-Za-z0-9+]*://", source):
        return "only hub ids (org/name), hf:// paths and local files are read; download it and give its path"
    if source.endswith(".py"):
        return f"a generator has the form file.py:function; write {source}:NAME"
    if re.fullmatch(r"datasets/[\w.-]+/[\w.-]+", source):
        return f"a hub id has the form org/name: write {source.removeprefix('datasets/')} (or ./{source} for a folder)"
    return ""
