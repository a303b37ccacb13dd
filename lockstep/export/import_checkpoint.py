"""`lockstep import`: converts a checkpoint of another trainer to a folder that every command reads: a model or a PEFT adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.state import read_tensors
from lockstep.errors import CheckpointError, ConfigError, ModelError
from lockstep.export.files import copy_model_files, in_the_making, new_folder, write_sharded
from lockstep.learner.adapter_files import CONFIG, TENSORS, read_adapter
from lockstep.models.folder import check_config, check_weights, missing_weights, weight_files
from lockstep.models.foreign import Foreign, Kind
from lockstep.models.load import structure, unreadable
from lockstep.models.torch_files import joined, module_states
from lockstep.models.weights import named_weights
from lockstep.text import reason_of

RECORD = "lockstep_import.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")
"""Prefixes that trainers put into the names of a state dict."""
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
_CONFIG = "give the config.json of the model that was trained, with --config"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Imported:
    """Facts of a finished import."""

    path: Path
    kind: Kind
    source: Path
    step: int
    parameters: int
    dtype: str
    base: str
    """Base model that an adapter says it was made for; "" for a model."""
    left: tuple[str, ...]
    """Files that only the other trainer can use."""


def import_checkpoint(found: Foreign, out: Path, *, config: Path | None = None, dtype: str | None = None) -> Imported:
    """Write `found` to the new folder `out`. `config` is a folder with config.json and tokenizer, where it has none itself.

    `dtype` (bf16, fp32) rounds; by default numbers stay as they were saved. Raises CheckpointError, and leaves nothing, unless
    names and shapes are exactly those of the model that config.json describes and all numbers are finite; ModelError if that file
    describes no model, there is no tokenizer, or an adapter is not PEFT's; ConfigError for options that an adapter excludes.
    """
    if found.kind is Kind.ADAPTER and (
        ignored := [name for name, given in (("--config", config), ("--dtype", dtype)) if given]
    ):
        raise ConfigError(
            [f"{', '.join(ignored)} cannot be used: {found.path} is an adapter, which is copied unchanged"],
            fix=f"leave {' and '.join(ignored)} out",
        )
    out = new_folder(out)
    with in_the_making(out) as folder:
        done = _adapter(found, folder, out) if found.kind is Kind.ADAPTER else _model(found, folder, out, config, dtype)
        facts = asdict(done) | {"path": str(out), "source": str(done.source)}
        (folder / RECORD).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return done


def _adapter(found: Foreign, folder: Path, out: Path) -> Imported:
    adapter = read_adapter(found.path)
    _require_peft(found.path)
    if not adapter.weights:
        raise CheckpointError(
            f"{TENSORS} holds no tensors", where=str(found.path), fix="copy the adapter's folder again"
        )
    for name, tensor in adapter.weights.items():
        _require_plain(name, tensor, found.path)
    for name in (CONFIG, TENSORS):
        shutil.copyfile(found.path / name, folder / name)
    if found.config is not None:
        copy_model_files(found.config, folder, "", whole=False)
    base = str(adapter.config.get("base_model_name_or_path") or "")
    first = next(iter(adapter.weights.values()))
    count = sum(tensor.numel() for tensor in adapter.weights.values())
    return Imported(out, found.kind, found.path, found.step, count, _name(first.dtype), base, found.beside)


def _model(found: Foreign, folder: Path, out: Path, config: Path | None, dtype: str | None) -> Imported:
    place = config or found.config
    if place is None or not (place / "config.json").is_file():
        raise CheckpointError(
            "no config.json beside the weights",
            where=str(found.path),
            fix="give the folder of the model that was trained (config and tokenizer) with --config",
        )
    check_config(place, str(place), False)
    weights = fitted(_read(found), place, found.path)
    if dtype is not None:
        weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in weights.items()}
    kinds = sorted({_name(tensor.dtype) for tensor in weights.values()})
    if len(kinds) > 1:
        raise CheckpointError(
            f"the weights mix {' and '.join(kinds)}", where=str(found.path), fix="choose one precision with --dtype"
        )
    copy_model_files(place, folder, kinds[0], whole=True)
    write_sharded(folder, weights)
    check_weights(folder, str(place))
    count = sum(tensor.numel() for tensor in weights.values())
    return Imported(out, found.kind, found.path, found.step, count, kinds[0], "", found.beside)


def _read(found: Foreign) -> Mapping[str, Tensor]:
    match found.kind:
        case Kind.FSDP:
            return joined(found.shards)
        case Kind.DEEPSPEED:
            if len(found.shards) > 1:
                what = f"the model is split (tensor-parallel or ZeRO 3): there are {len(found.shards)} files of model states"
                fix = "run zero_to_fp32.py, which DeepSpeed saved beside it, with --safe_serialization, then import its result"
                raise CheckpointError(what, where=str(found.path), fix=fix)
            return module_states(found.shards[0])
        case _:
            if missing := missing_weights(found.path):
                raise CheckpointError(f"{missing} is missing", where=str(found.path), fix="copy the whole folder again")
            whole = "model.safetensors"  # transformers takes it before an index; what neither names is of another save
            names = [whole] if (found.path / whole).is_file() else weight_files(found.path)
            files = sorted(path for path in found.path.glob("*.safetensors") if path.name in names)
            return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def fitted(weights: Mapping[str, Tensor], config: Path, where: Path) -> dict[str, Tensor]:
    """Return the weights by the checkpoint's names, tied ones once.

    Raises CheckpointError unless they are exactly those of the model that config.json describes.
    """
    expected, tied = _shapes(config)
    own = {_plain_name(name): tensor for name, tensor in weights.items()}
    if len(own) < len(weights):
        raise CheckpointError(
            "two tensors have the same name once prefixes of wrappers, such as module., are removed",
            where=str(where),
            fix="save the state dict of one model alone, then import it",
        )
    if tied and HEAD in own and EMBEDDING in own:
        if not torch.equal(own[HEAD], own[EMBEDDING]):
            what = "the output head and the embedding differ, but config.json says that they are tied"
            raise CheckpointError(
                what, where=str(where), fix=f"set tie_word_embeddings to false in {config}/config.json"
            )
        del own[HEAD]
    lora = sorted(name for name in own if ".lora_" in name or ".base_layer." in name)
    if lora:
        what = f"the checkpoint holds shards of a model with an adapter ({len(lora)} tensors such as {lora[0]})"
        raise CheckpointError(
            what, where=str(where), fix="import the folder lora_adapter beside the shards, which holds the adapter"
        )
    for names, what in (
        (expected.keys() - own.keys(), "are missing"),
        (own.keys() - expected.keys(), "do not belong to the model"),
    ):
        if names:
            raise CheckpointError(
                f"{len(names)} tensors {what}, such as {sorted(names)[0]}",
                where=str(where),
                fix=_CONFIG,
            )
    for name, shape in expected.items():
        if tuple(own[name].shape) != shape:
            what = f"{name} has the shape {tuple(own[name].shape)}, but config.json gives {shape}"
            raise CheckpointError(what, where=str(where), fix=_CONFIG)
        _require_plain(name, own[name], where)
    return own


def _require_plain(name: str, tensor: Tensor, where: Path) -> None:
    """Raise CheckpointError unless these are finite numbers of a precision that a model can have."""
    kind = "sparse" if tensor.layout != torch.strided else _name(tensor.dtype)
    if kind not in PRECISIONS:
        what = f"{name} is {kind}: only plain weights in {', '.join(PRECISIONS)} can be imported"
        raise CheckpointError(what, where=str(where), fix="dequantise the model with the program that wrote it")
    if not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{name} has values that are not finite", where=str(where), fix="import a step before training diverged"
        )


def _require_peft(folder: Path) -> None:
    """Raise ModelError unless PEFT knows what adapter_config.json describes."""
    from peft import PeftConfig

    try:
        if PeftConfig.from_pretrained(str(folder)).peft_type is None:
            raise ValueError("peft_type is missing")
    except (ValueError, KeyError, TypeError, OSError) as error:
        what = f"{CONFIG} does not describe an adapter of PEFT: {reason_of(error)}"
        raise ModelError(what, where=str(folder), fix="give a folder that PEFT's save_pretrained wrote") from error


def _shapes(config: Path) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return names and shapes of the model's published checkpoints, tied weights once, and whether head and embedding are one."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        model: Any = structure(config)
    except unreadable() as error:
        raise ModelError(
            f"config.json describes no model that transformers can build: {reason_of(error)}",
            where=str(config),
            fix=_CONFIG,
        ) from error
    weights = dict(revert_weight_conversion(model, dict(named_weights(model))))
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}, bool(
        model.config.get_text_config().tie_word_embeddings
    )


def _plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
