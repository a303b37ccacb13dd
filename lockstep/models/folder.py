"""Checks a model's folder before it is loaded. Reads only JSON; does not import torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lockstep.errors import ModelError

INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's files of an adapter."""
MXFP4 = "mxfp4"
"""The one quantisation that is read: see mxfp4.py."""
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
"""Settings of the machine that wrote a config.json: they say how to compute, not what, and are not followed."""
MOST = {"layers": 10_000, "layer": 10_000, "blocks": 10_000, "experts": 100_000}
"""Limits of what a config counts, by the last word of the name: each becomes objects in memory before a size is checked."""
LEAST = {"num_hidden_layers": 1, "n_layer": 1, "max_position_embeddings": 0}
"""Least values of what a config counts; a context of 0 means that it does not say."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


def check_config(folder: Path, where: str, trust_remote_code: bool) -> None:
    """Check what the JSON files alone can tell, before the weights are fetched.

    Raises:
        ModelError: no config.json, or it asks for code of its own or for quantised weights.
    """
    if not (folder / "config.json").is_file():
        raise _no_config(folder, where)
    config = read_json(folder / "config.json")
    _refuse_countless(config, where)
    if (folder / GENERATION).is_file():  # transformers fails on some of what is no mapping, and ignores what is no JSON
        read_json(folder / GENERATION)
    if "auto_map" in config and not trust_remote_code and not _known_to_transformers(config.get("model_type")):
        raise ModelError(
            "the model needs its own Python code, which is not run without your permission",
            where=where,
            fix="read the *.py files in its folder; if you trust them, set model.trust_remote_code=true",
        )
    for part in (config, config.get("text_config")):  # some models of images say it of their text alone
        if isinstance(part, dict):
            _refuse_too_few(part, where)
            _refuse_quantised(part.get("quantization_config"), where)


def _refuse_quantised(quantization: object, where: str) -> None:
    """Raise ModelError for a config's quantisation that is not read here."""
    method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
    if quantization and method != MXFP4:
        raise ModelError(
            f"the weights are quantised (quant_method: {method}); only bf16, fp16, fp32 and {MXFP4} weights can be read",
            where=where,
            fix="use the unquantised version of this model, or dequantise it into a folder and use that",
        )


def _refuse_countless(config: dict[str, Any], where: str) -> None:
    """Raise ModelError for a number of layers or experts that no model has: to make them would take all memory."""
    for name, value in config.items():
        if isinstance(value, dict):
            _refuse_countless(value, where)
        elif isinstance(value, (int, float)) and value > MOST.get(name.rpartition("_")[2], math.inf):
            raise ModelError(
                f"config.json says {name} = {value:.3g}, which is too large for any model",
                where=where,
                fix="fetch the model again",
            )


def _refuse_too_few(config: dict[str, Any], where: str) -> None:
    """Raise ModelError for a model without layers, or with a negative length."""
    for name, least in LEAST.items():
        value = config.get(name)
        if isinstance(value, (int, float)) and value < least:
            raise ModelError(
                f"config.json says {name} = {value}, but the least is {least}",
                where=where,
                fix=f"correct {name} in config.json, or fetch the model again",
            )


def check_weights(folder: Path, where: str) -> None:
    """Check that all safetensors and tokenizer files are there.

    Raises:
        ModelError: names what is missing.
    """
    if missing := missing_weights(folder):
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise ModelError(
                "the folder has only pickle weights (*.bin, *.pt), which can run code when they are read",
                where=where,
                fix="if you trust them, convert them to safetensors: AutoModelForCausalLM.from_pretrained(A)"
                ".save_pretrained(B)",
            )
        raise ModelError(
            f"the weight file {missing} is missing", where=where, fix="fetch the model again, or give another folder"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)})",
            where=where,
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        )


def missing_weights(folder: Path) -> str | None:
    """Return the name of the first weight file that should be there and is not."""
    return next((name for name in weight_files(folder) if not (folder / name).is_file()), None)


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files that should be there. Raises ModelError if the index of them is not valid."""
    if not (folder / INDEX).is_file():
        return ["model.safetensors"]
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    shards = weight_map.values() if isinstance(weight_map, dict) else ()
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise ModelError(
            "the index of weight files has no valid weight_map",
            where=str(folder / INDEX),
            fix="fetch the model again",
        )
    if not isinstance(index.get("metadata"), dict):  # transformers takes it without asking whether it is there
        raise ModelError(
            "the index of weight files has no mapping called metadata",
            where=str(folder / INDEX),
            fix='add "metadata": {} to the file, or fetch the model again',
        )
    return sorted(set(shards))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is a mapping. Raises ModelError otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"this file is not valid JSON: {error}", where=str(path), fix="fetch or write the file again"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(
            f"the JSON file holds a {type(content).__name__}, not a mapping",
            where=str(path),
            fix="fetch or write the file again",
        )
    return content


def _no_config(folder: Path, where: str) -> ModelError:
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        return ModelError(
            f"this is an adapter for {base}, not a model", where=where, fix="set model.path to the base model"
        )
    if any(folder.glob("*.gguf")):
        return ModelError(
            "GGUF files cannot be used as a model", where=where, fix="use the model in safetensors format"
        )
    return ModelError(
        "this is not a model folder: config.json is missing", where=where, fix="give the folder with config.json"
    )


def _known_to_transformers(model_type: object) -> bool:
    """Return whether transformers has a class of its own for it; then the model's code is not run, even if there is some."""
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING
