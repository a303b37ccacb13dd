"""Finds the shape of a model in a folder, from config.json alone if its family is known.

A model of any other family is built on the meta device, which allocates no memory for weights, and its parameters are counted.
So is a model whose safetensors headers disagree with the count from config.json.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.adapter import keeps_mxfp4
from lockstep.errors import ModelError
from lockstep.models.folder import read_json
from lockstep.models.stored import stored_parameters
from lockstep.plan.shapes import PACKED_BYTES, ModelShape, shape_of

if TYPE_CHECKING:
    from lockstep.config.schema import Recipe


def recipe_shape(recipe: Recipe, folder: Path) -> ModelShape:
    """Return the shape of the model in a folder as the recipe's run holds it. Raises ModelError as `read_shape` does."""
    shape = read_shape(folder)
    return replace(shape, expert_bytes=PACKED_BYTES) if keeps_mxfp4(recipe.adapter) else shape


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the model in a folder. Raises ModelError if config.json is missing or describes no decoder.

    Imports torch only for a family that is not in FAMILIES, for a config that leaves sizes out, and where the weight files
    hold another number of parameters.
    """
    config = read_json(folder / "config.json")
    shape = shape_of(config)
    if shape is not None:
        stored = stored_parameters(folder)
        # Some files keep a tied weight under both of its names.
        if stored in (None, shape.parameters, shape.parameters + shape.head * shape.tied):
            return shape
    return measured_shape(folder)


def measured_shape(folder: Path) -> ModelShape:
    """Return the shape of a model that is built on the meta device: any decoder that transformers knows. Imports torch."""
    from lockstep.plan.modules import shape_of_model

    model = meta_model(folder)
    try:
        return shape_of_model(model)
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
    ) as error:  # a family with words of its own
        what = f"the sizes of this model cannot be determined: {type(error).__name__}: {error}"
        raise ModelError(
            what, where=str(folder / "config.json"), fix="check config.json, or choose another model"
        ) from error


def meta_model(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return a transformers model whose weights take no memory. Raises ModelError if it cannot be built."""
    from lockstep.models.load import structure

    try:
        return structure(folder, trust_remote_code)
    except Exception as error:  # whatever transformers makes of a config that lies
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"transformers cannot build a model from this file: {reason}",
            where=str(folder / "config.json"),
            fix="check config.json, or fetch the model again",
        ) from error
