"""Supervised fine-tuning: which rows, and which of their turns carry loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.data import Data
from lockstep.config.section import Section


class Sft(Section):
    """Supervised fine-tuning on given replies; used by loop = sft alone."""

    data: Data
    """Training rows: a conversation (messages), or a question and its reply (prompt, answer)."""
    validation: Data | None = None
    """Rows whose loss is measured and never trained on; none splits validation_rows off the data by hash."""
    validation_rows: int = Field(default=64, ge=0)
    """Rows split off when there is no validation set; 0 for none."""
    sequences_per_step: int = Field(default=32, ge=1)
    """Rows of one optimizer step."""
    max_tokens: int = Field(default=2048, ge=2)
    """Longest row, prompt and replies together."""
    too_long: Literal["stop", "drop", "truncate"] = "stop"
    """What becomes of a longer row; dropped and truncated rows are counted."""
    train_on: Literal["last", "all_assistant"] = "last"
    """Which turns carry loss: the last assistant turn, or all of them."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether each token of a step counts alike, or each row."""
