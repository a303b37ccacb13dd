"""A query of the web page for rollouts: which rows, in which order; and its SQL."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

ORDERS = {
    "newest": "step DESC, row",
    "oldest": "step, row",
    "reward": "reward DESC NULLS LAST, step DESC, row",
    "worst": "reward ASC NULLS LAST, step DESC, row",
    "advantage": "abs(advantage) DESC, step DESC, row",
    "longest": "length DESC, step DESC, row",
    "shortest": "length, step DESC, row",
}
"""Orders of the list; all end with the place of the row, so that pages never overlap."""

LARGEST = 2**31 - 1
"""Largest step, or row of a step, that a table holds."""
Text: TypeAlias = Annotated[str, Field(max_length=1000)]
Whole: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]


class Query(BaseModel):
    """Filters of rollouts; None and "" leave one out."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run: Whole = Field(default=0, ge=0)
    first: Whole | None = None
    """Step, inclusive."""
    last: Whole | None = None
    result: Literal["", "right", "wrong", "unscored"] = ""
    answer: Literal["", "found", "none"] = ""
    """found: the grader read an answer in the reply."""
    finish: Literal["", "stop", "length"] = ""
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: Whole | None = None
    length_max: Whole | None = None
    text: Text = ""
    """Looked for in replies, questions and answers; upper and lower case are the same."""
    prompt: Text = ""
    order: Literal["newest", "oldest", "reward", "worst", "advantage", "longest", "shortest"] = "newest"
    offset: Whole = Field(default=0, ge=0)
    limit: int = Field(default=50, ge=1, le=500)

    def where(self, newest: int | None) -> tuple[str, list[object]]:
        """Return the SQL condition and its values. `newest` is the run's last step; rows beyond it belong to no weights."""
        bounds: list[tuple[str, object]] = [
            ("run = ?", self.run), ("step <= ?", newest), ("step >= ?", self.first), ("step <= ?", self.last),
            ("reward >= ?", self.reward_min), ("reward <= ?", self.reward_max), ("length >= ?", self.length_min),
            ("length <= ?", self.length_max), ("prompt_id = ?", self.prompt or None), ("finish = ?", self.finish or None),
            ("contains(searched, lower(?))", self.text or None),
        ]  # fmt: skip
        parts = [(condition, [value]) for condition, value in bounds if value is not None]
        match self.result:
            case "right":
                parts.append(("is_right", []))
            case "wrong":
                parts.append(("NOT is_right", []))
            case "unscored":
                parts.append(("is_right IS NULL", []))
        if self.answer:
            parts.append((f"extracted IS {'NOT ' if self.answer == 'found' else ''}NULL", []))
        return " AND ".join(condition for condition, _ in parts), [value for _, values in parts for value in values]
