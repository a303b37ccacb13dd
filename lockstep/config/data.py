"""Where rows come from: a hub data set, files, or a generator, with the columns and filters that make prompts of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import Json, Section


class Filter(Section):
    """One named stage of a data pipeline: rows that fail it are dropped and counted."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Its name in the counts."""
    kind: str
    """Which filter; `lockstep data filters` lists them with their settings."""
    settings: dict[str, Json] = Field(default_factory=dict)
    """Its own settings."""


class Data(Section):
    """Rows. Example: {source: openai/gsm8k, subset: main, split: train}"""

    source: str = Field(min_length=1)
    """A hub id (org/name), an hf:// path, a local .parquet, .jsonl, .csv file or folder, or file.py:generator."""
    preset: str | None = None
    """Columns and answer format of a known data set, by name; `lockstep data presets` lists them."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a hub data set; none takes train."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    prompt: str | None = None
    """Column with the question, as text or messages; none takes the preset's, else prompt."""
    answer: str | None = None
    """Column with the reference answer, or with the response in SFT; none takes the preset's, else answer."""
    messages: str | None = None
    """Column with a whole conversation, instead of prompt and answer."""
    id: str | None = None
    """Column with a unique id; none numbers the rows."""
    filters: list[Filter] = Field(default_factory=list)
    """Applied in order; each reports how many rows it dropped, and five of them."""
    max_rows: int | None = Field(default=None, ge=1)
    """Take only the first so many rows after the filters."""
    on_bad_row: Literal["stop", "drop"] = "stop"
    """stop names every bad row and refuses; drop counts and reports them."""
