"""Which weights are trained: all of them, or adapters through PEFT."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from lockstep.config.section import Section


class NoAdapter(Section):
    """Train all weights."""

    kind: Literal["none"] = "none"


class Lora(Section):
    """Train low-rank adapters by PEFT; the base is frozen and shared by policy, reference and engine."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the linear layers that get an adapter, or all of them but the head."""


Adapter: TypeAlias = Annotated[NoAdapter | Lora, Field(discriminator="kind")]
