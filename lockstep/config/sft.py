"""Settings of supervised fine-tuning: the rows, and the turns that carry loss."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.data import Data
from lockstep.config.section import Place, Section


class Rollouts(Section):
    """Replies that another run sampled and graded: rejection sampling. Their token ids are kept as they were sampled."""

    run: Place = Field(min_length=1)
    """The run's directory."""
    keep: Literal["right", "all"] = "right"
    """right keeps correct replies alone; replies that were cut off or could not be scored are never kept."""
    per_prompt: int = Field(default=4, ge=1)
    """Largest number of different replies to one question, the latest first."""
    first_step: int = Field(default=1, ge=1)
    """Take replies from this step of the run on."""


class Sft(Section):
    """Supervised fine-tuning on given replies; used by loop = sft alone."""

    data: Data | None = None
    """Training rows: a conversation (messages), or a question and its reply (prompt, answer)."""
    rollouts: Rollouts | None = None
    """Replies of a run, instead of data."""
    validation: Data | None = None
    """Rows whose loss is measured and never trained on; none splits validation_rows off the data by hash."""
    validation_rows: int = Field(default=64, ge=0)
    """Questions split off when there is no validation set; 0 for none."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps between measurements of the validation loss; none is eval.every. The first and last step always have one."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows, instead of steps: the number of steps is worked out from the rows before the run starts."""
    sequences_per_step: int = Field(default=32, ge=1)
    """Rows of one optimizer step."""
    max_tokens: int = Field(default=2048, ge=2)
    """Longest row, prompt and replies together."""
    too_long: Literal["stop", "drop", "truncate"] = "stop"
    """Treatment of longer rows; dropped and truncated rows are counted."""
    train_on: Literal["last", "all_assistant"] = "last"
    """Turns that carry loss: the last assistant turn, or all of them."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all tokens of a step, or over its rows."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.rollouts is None):
            both = "data and rollouts are both set" if self.data else "neither data nor rollouts is set"
            raise ValueError(f"{both}: rows come from one of the two (data.source, or rollouts.run)")
        return self
