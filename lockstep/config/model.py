"""Settings of the model to train."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.section import PathText, Section


class Model(Section):
    """The model to train."""

    path: PathText = Field(default="smollm2-135m-instruct", min_length=1)
    """A built-in name (smollm2-135m-instruct), a hub id (org/name), or a local folder."""
    revision: str | None = None
    """Hub branch, tag or commit; none takes the hub's default."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the weights that are trained and that sample; auto is bf16 on a GPU and fp32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read it."""
