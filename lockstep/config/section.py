"""The base class of every group of settings."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, model_validator

TAG = "kind"
"""The field that names the variant wherever a section has several."""

Json: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None


class Section(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ShortSection(Section):
    """A section for which a text may stand: the value of its field SHORT."""

    SHORT: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {cls.SHORT: value} if isinstance(value, str) else value
