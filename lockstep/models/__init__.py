"""Resolves the name of a model in a recipe to a folder, and loads the model and the tokenizer from it.

    resolve(settings)   built-in name, hub id or folder  →  ResolvedModel: a checked folder on this machine
    load_tokenizer      ResolvedModel  →  tokenizer
    load_model          ResolvedModel  →  model with weights of one dtype on one device

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from lockstep.models.load import load_model, load_tokenizer, resolve_dtype
from lockstep.models.resolve import ResolvedModel, Source, resolve

__all__ = ["ResolvedModel", "Source", "load_model", "load_tokenizer", "resolve", "resolve_dtype"]
