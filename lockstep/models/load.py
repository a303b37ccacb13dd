"""Loads a tokenizer and a model from a resolved folder. The heavy imports are inside the functions that need them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import ModelError
from lockstep.models.folder import IMPLEMENTATIONS
from lockstep.models.mxfp4 import is_mxfp4, read_dense, read_packed, read_weights
from lockstep.models.resolve import ResolvedModel
from lockstep.models.stored import stored_parameters, stored_tensors
from lockstep.text import reason_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MOST_NAMED = 5
"""Parameter names that a message lists; it counts the others."""

ROOM = 2**26
"""Parameters that a config may describe beyond those in the files until what is missing is named instead."""


def resolve_dtype(setting: Literal["auto", "bf16", "fp32"], device: torch.device | str) -> torch.dtype:
    """Return the precision of the weights: auto is bf16 on a GPU and fp32 on a CPU."""
    import torch

    if setting == "auto":
        setting = "fp32" if torch.device(device).type == "cpu" else "bf16"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[setting]


def load_tokenizer(resolved: ResolvedModel) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, padding on the left; a missing pad token becomes the end token.

    Raises:
        ModelError: it or the config cannot be read, or it names no end token.
    """
    from transformers import AutoTokenizer

    # AutoTokenizer reads it too: its fault is not the tokenizer's.
    read_config(resolved.path, resolved.trust_remote_code)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            resolved.path, padding_side="left", local_files_only=True, trust_remote_code=resolved.trust_remote_code
        )
    except unreadable() as error:
        raise ModelError(
            f"the tokenizer cannot be read: {reason_of(error)}", where=str(resolved.path), fix="fetch the model again"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end token (eos_token), so no reply could end",
            where=str(resolved.path),
            fix="set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    resolved: ResolvedModel,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
    packed: bool = False,
) -> PreTrainedModel:
    """Load the model with all parameters in `dtype` on `device`, in evaluation mode; buffers keep their own precision.

    `attention` is a name of transformers' attention interface: eager, sdpa, flash_attention_2, or a registered one. With
    `packed`, experts of an MXFP4 checkpoint stay as they are stored.

    Raises:
        ModelError: it cannot be read, or the files lack parameters, which would otherwise be random.
    """
    from lockstep.models.attention import NAME as ATTENTION
    from lockstep.models.states import follow_layouts

    try:
        with quiet():
            empty: Any = structure(resolved.path, resolved.trust_remote_code)
            _refuse_absurd(resolved, sum(parameter.numel() for parameter in empty.parameters()))
            source: dict[str, Any] = {"pretrained_model_name_or_path": resolved.path}
            if is_mxfp4(resolved.path):
                source = {"pretrained_model_name_or_path": None, "state_dict": dict(read_weights(resolved.path, dtype))}
            kind: Any = type(empty)  # its annotations do not know output_loading_info
            model, report = kind.from_pretrained(
                **source,
                config=empty.config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are named below
            )
    except unreadable() as error:
        raise ModelError(
            f"the model cannot be loaded: {reason_of(error)}",
            where=str(resolved.path),
            fix="check its config.json, or fetch the model again",
        ) from error
    _refuse_random(resolved.path, [*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])])
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s: %s in the files belong to no parameter of the model", resolved.name, _some(unused))
    for parameter in model.parameters():  # not model.to(dtype), which would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    if packed:
        _pack_experts(model, resolved.path, device)
    if is_mxfp4(resolved.path):
        if not packed:
            _fill_experts(model, resolved.path, device, unused)
        if (generation := _generation(resolved)) is not None:
            model.generation_config = generation
    placed: PreTrainedModel = model.to(device).eval()
    if attention == ATTENTION:
        follow_layouts(placed)  # its copies do so, too
    return placed


def _fill_experts(model: PreTrainedModel, folder: Path, device: torch.device | str, unused: list[str]) -> None:
    """Dequantise MXFP4 weights on the device, for a model that was read without them. Raises ModelError if it lacks one."""
    empty = dict(model.named_parameters())
    for name, weight in read_dense(folder, next(iter(empty.values())).dtype, device):
        if name in empty:
            empty[name].data = weight
        elif name not in unused:  # loaded under another name, as zeros
            what = f"{name}: MXFP4 weights of a parameter that the model gives another name"
            raise ModelError(
                what, where=str(folder), fix="dequantise the model into a folder with the tool that wrote it"
            )


def _pack_experts(model: PreTrainedModel, folder: Path, device: torch.device | str) -> None:
    """Replace the experts of a model that was read without them. Raises ModelError if one is left without its weights."""
    from lockstep.models.known import kind_of_experts
    from lockstep.models.mxfp4_experts import Mxfp4Experts

    packed = read_packed(folder, device) if is_mxfp4(folder) else {}
    missing = [] if packed else ["all experts"]
    for name, module in list(model.named_modules()):
        if kind_of_experts(module) == "paired":
            parts = [packed.pop(f"{name}.{part}", None) for part in ("gate_up_proj", "down_proj")]
            if parts[0] is None or parts[1] is None:
                missing.append(name)
            else:
                model.set_submodule(name, Mxfp4Experts(module, parts[0], parts[1]))
    if missing or packed:
        what = (
            f"the files hold no MXFP4 weights of {', '.join(missing[:3])}"
            if missing
            else f"{_some(sorted(packed))}: MXFP4 weights of experts whose code Lockstep does not know"
        )
        raise ModelError(f"adapter.base = mxfp4 cannot be used: {what}", where=str(folder), fix="set adapter.base=full")


def structure(folder: Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build the model of a folder on the meta device, without memory for its weights. Raises whatever transformers raises.

    Attention and expert kernels named in config.json are ignored: the caller of `load_model` chooses them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = read_config(folder, trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for part in parts_of(config):
        for name in IMPLEMENTATIONS:
            setattr(part, f"{name}_internal", None)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """Read a folder's config as transformers completes it. Raises ModelError for one that it cannot read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever transformers makes of a config that lies
        raise ModelError(
            f"config.json describes no model that transformers can build: {reason_of(error)}",
            where=str(folder),
            fix="check config.json, or fetch the model again",
        ) from error


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a config of transformers and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from parts_of(value)


def _generation(resolved: ResolvedModel) -> Any:
    """Return the folder's settings of generation (end tokens), for a model that was not loaded from it; None if it has none."""
    from transformers import GenerationConfig

    if not (resolved.path / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(resolved.path, local_files_only=True)


def refuse_unlike(folder: Path, model: Any) -> None:
    """Raise ModelError, from headers alone, if the weight files lack tensors of the model or have them in another size.

    Some families are stored under other names or in other parts: what is missing can be told only if every stored name is also
    one of the model's.
    """
    stored = stored_tensors(folder)
    if stored is None:
        return
    places = model.state_dict(keep_vars=True)
    names = [name for name, tensor in places.items() if stored.get(name, tensor.numel()) != tensor.numel()]
    if stored.keys() <= places.keys():
        there = {id(places[name]) for name in stored}  # tied weights are one tensor, stored under any of its names
        ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
        missing = [name for name, parameter in model.named_parameters() if id(parameter) not in there]
        names += [name for name in missing if not any(pattern.search(name) for pattern in ignored)]
    _refuse_random(folder, names)


def _refuse_random(folder: Path, names: list[str]) -> None:
    if names:
        raise ModelError(
            f"{_some(sorted(names))} missing in the weight files or of another shape: random values would be used",
            where=str(folder),
            fix="fetch the model again; config.json and *.safetensors must belong together",
        )


def _refuse_absurd(resolved: ResolvedModel, described: int) -> None:
    """Raise ModelError, before memory is taken, if the config describes far more than the files hold."""
    stored = stored_parameters(resolved.path)
    if stored is not None and described > 2 * stored + ROOM:
        raise ModelError(
            f"config.json describes {described:,} parameters, but the weight files hold {stored:,}",
            where=str(resolved.path),
            fix="fetch the model again; config.json and *.safetensors must belong together",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({', '.join(names[:MOST_NAMED])}{more})"


def unreadable() -> tuple[type[Exception], ...]:
    """Return the errors that transformers raises for files that it cannot use."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    lying = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
    return (OSError, ValueError, ImportError, RuntimeError, *lying, SafetensorError, StrictDataclassError)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and load reports; its settings are global, so they are restored."""
    import transformers

    their_logging: Any = transformers.logging
    bars, level = their_logging.is_progress_bar_enabled(), their_logging.get_verbosity()
    their_logging.disable_progress_bar()
    their_logging.set_verbosity_error()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if bars:
            their_logging.enable_progress_bar()
