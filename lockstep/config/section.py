"""Base of every group of settings."""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

TAG = "kind"
"""The field that names the variant wherever a section has several."""

Json: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None


class Section(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
