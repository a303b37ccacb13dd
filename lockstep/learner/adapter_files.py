"""Reads and writes adapters as folders in PEFT's layout, with the identity of the base they were trained on.

    adapter_config.json          PEFT's
    adapter_model.safetensors    PEFT's names; fits the original base with PEFT or vLLM
    adapter_base.json            ours: name and fingerprint of that base, and whether the adapter began as PiSSA or OLoRA

An adapter that was initialised from the base's own weights (adapter_start.py) is written as a LoRA of twice the rank over the
original base: A stacked on A₀, and B beside -B₀, so that their product is B A - B₀ A₀.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.adapter import RESIDUAL_INITS, Adapter, Lora
from lockstep.errors import ModelError
from lockstep.learner.adapter_start import START_A, START_B, lora_layers, start_of
from lockstep.learner.lora_experts import describe_targets, file_layer, from_file, in_experts, live_layer, to_file
from lockstep.models.folder import ADAPTER_CONFIG, ADAPTER_TENSORS, read_json
from lockstep.models.mxfp4 import dense_weights
from lockstep.models.weights import named_weights
from lockstep.sync.fingerprint import fingerprint
from lockstep.types import WeightStream

CONFIG, TENSORS, BASE = ADAPTER_CONFIG, ADAPTER_TENSORS, "adapter_base.json"
PREFIX = "base_model.model."
_PLAIN = re.compile(r"[\w.\\^$-]*")
"""An expression that cannot take long: nothing in it repeats."""
_PART = re.compile(r"(lora|vera|oft|boft|hra|hada|lokr|ia3|miss|delora|randlora)_")
"""Prefix of PEFT's names of an adapter's parameters."""
_CHANGE_BASE = (*RESIDUAL_INITS, "corda", "loftq", "lora_ga")
"""Initialisations that change the base, so that the adapter fits that base alone."""
_MODULES = (".lora_A", ".lora_B")
"""Parts whose names in PEFT's files end with .weight."""


@dataclass(frozen=True, slots=True)
class Base:
    """The weights that an adapter was made for. Example: Base("Qwen/Qwen3-4B", "9f…", "bfloat16")"""

    name: str
    fingerprint: str
    """Fingerprint of all its weights in this precision, before any adapter."""
    dtype: str

    @staticmethod
    def of(model: nn.Module, name: str) -> Base:
        """Describe `model`, which has no adapters."""
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        weights = fingerprint(dense_weights(model))  # kept in MXFP4 or not, it is the same base
        return Base(name, weights.combined, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A saved adapter. Tensor names are those of lockstep.models.weights, starts included."""

    path: Path
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    base: Base | None
    """The base; None for a folder that other programs wrote."""
    residual: str = ""
    """Residual start of the weights: pissa, olora, or "" for none."""


# --- write ----------------------------------------------------------------------------------------------------------
def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the active adapter under PEFT's file names, for the original base."""
    starts = {name: start for name, layer in lora_layers(model).items() if (start := start_of(layer)) is not None}
    tensors = {}
    for name, tensor in trained_tensors(model):
        start = starts.get(name.rsplit(".lora_", 1)[0])
        if start is not None and name.endswith(".lora_A"):
            tensor = torch.cat([tensor, start[0].to(tensor.device)])
        elif start is not None and name.endswith(".lora_B"):
            tensor = torch.cat([tensor, -start[1].to(tensor.device)], 1)
        tensors[file_name(name)] = to_file(name, tensor)
    return tensors


def trained_tensors(model: nn.Module) -> WeightStream:
    """Yield the parameters of the active adapter."""
    return ((n, t) for n, t in named_weights(model, trainable_only=True) if not n.endswith(".lora_scaling"))


def saved_texts(model: nn.Module, adapter: Adapter, base: Base) -> dict[str, str]:
    """Return the two JSON files beside the tensors."""
    config: Any = model.peft_config["default"]  # type: ignore[index]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        content = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    content["base_model_name_or_path"] = base.name
    content["target_modules"] = sorted(content["target_modules"]) if content.get("target_modules") else None
    content["inference_mode"] = True
    residual = ""
    if isinstance(adapter, Lora):
        describe_targets(adapter, content)
    if isinstance(adapter, Lora) and adapter.init in RESIDUAL_INITS:
        residual = adapter.init
        content |= {"r": 2 * adapter.rank, "lora_alpha": adapter.scaling * 2 * adapter.rank, "use_rslora": False}
    ours = asdict(base) | {"residual": residual}
    return {CONFIG: json.dumps(content, indent=2, sort_keys=True), BASE: json.dumps(ours, indent=2, sort_keys=True)}


def save_adapter(folder: Path, model: nn.Module, adapter: Adapter, base: Base) -> None:
    """Write the three files into `folder`, which is created if missing."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, content in saved_texts(model, adapter, base).items():
        (folder / name).write_text(content, encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in saved_tensors(model).items()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


# --- read -----------------------------------------------------------------------------------------------------------
def read_adapter(folder: Path) -> AdapterFolder:
    """Read an adapter. Raises ModelError unless it has PEFT's layout with safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if missing := [name for name in (CONFIG, TENSORS) if not (folder / name).is_file()]:
        raise ModelError(
            f"the folder has no adapter in PEFT's layout: {' and '.join(missing)} not found",
            where=str(folder),
            fix="give a folder that PEFT's save_pretrained wrote, or a checkpoint of an adapter run",
        )
    config = read_json(folder / CONFIG)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{TENSORS} cannot be read: {error}", where=str(folder), fix="copy the folder again"
        ) from error
    base, residual = read_base(folder)
    init = config.get("init_lora_weights")
    if base is None and isinstance(init, str) and init.startswith(_CHANGE_BASE):
        raise ModelError(
            f"the adapter fits only a base that its initialisation ({init}) had changed",
            where=str(folder),
            fix="save it for the original base: PEFT's save_pretrained with path_initial_model_for_weight_conversion",
        )
    _require_sane(config, tensors, folder)
    live = live_tensors(tensors, residual=bool(residual))
    return AdapterFolder(folder, config, live, base, residual)


def _require_sane(config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ModelError for a rank that no tensor has, which would take memory, and for expressions that may take for ever."""
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    ranks = {"r": config.get("r"), **(patterns[0] if isinstance(patterns[0], dict) else {})}
    for name, rank in ranks.items():
        if rank is not None and tensors and not (isinstance(rank, int) and 0 <= rank <= largest):
            raise ModelError(
                f"{CONFIG} gives {name} a rank of {str(rank)[:40]}, but no dimension of its tensors is larger than {largest}",
                where=str(folder),
                fix="save the adapter again, so that its config and its tensors belong together",
            )
    alphas = {"r": config.get("r", 1), "lora_alpha": config.get("lora_alpha", 1)}
    alphas |= patterns[1] if isinstance(patterns[1], dict) else {}
    for name, value in alphas.items() if config.get("peft_type", "LORA") == "LORA" else ():
        if not (isinstance(value, int | float) and value > 0):
            raise ModelError(
                f"{CONFIG} gives {name} as {str(value)[:40]}, not as a number above 0",
                where=str(folder),
                fix=f"write the value that the adapter was trained with into {CONFIG}",
            )
    listed = [config.get(name) or () for name in ("modules_to_save", "layers_pattern")]
    words = [str(word) for words in (*patterns, *listed) for word in ([words] if isinstance(words, str) else words)]
    if strange := [word for word in words if not _PLAIN.fullmatch(word)]:
        raise ModelError(
            f"{CONFIG} chooses modules by the expression {strange[0][:80]!r}, which is not supported",
            where=str(folder),
            fix=f"list the modules by their names in {CONFIG}",
        )


def layers_of(names: Iterable[str]) -> list[str]:
    """Return the full names of the linear layers that an adapter's tensors belong to, by their names, not by its config."""
    parts = (name.removeprefix(PREFIX).split(".") for name in names if not in_experts(live_name(name)))
    ends = ((part, next((i for i, word in enumerate(part) if _PART.match(word)), None)) for part in parts)
    return sorted({".".join(part[:end]) for part, end in ends if end})


def read_base(folder: Path) -> tuple[Base | None, str]:
    """Return the content of adapter_base.json; (None, "") if there is none."""
    if not (folder / BASE).is_file():
        return None, ""
    content = read_json(folder / BASE)
    try:
        return Base(content["name"], content["fingerprint"], content["dtype"]), str(content["residual"])
    except KeyError as error:
        raise ModelError(
            f"{BASE} has no entry {error}", where=str(folder), fix=f"delete {BASE}, or save the adapter again"
        ) from error


def live_tensors(tensors: Mapping[str, Tensor], *, residual: bool) -> dict[str, Tensor]:
    """Translate PEFT's file names to those of lockstep.models.weights; with `residual` the start is split off again."""
    live: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own = live_name(name)
        if residual and own.endswith(".lora_A"):
            live[own], live[own.removesuffix(".lora_A") + START_A] = tensor.chunk(2)
        elif residual and own.endswith(".lora_B"):
            trained, start = tensor.chunk(2, 1)
            live[own], live[own.removesuffix(".lora_B") + START_B] = trained, -start
        else:
            live[own] = tensor
    return live


def in_own_layout(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file, those of experts in the layout of the model's own `own`."""
    return {name: from_file(name, tensor, own[name]) if name in own else tensor for name, tensor in tensors.items()}


def check_base(found: AdapterFolder, base: Base) -> str:
    """Return a warning if it is unknown whether an adapter fits, else "". Raises ModelError if it was made for another base."""
    if found.base is None:
        made_for = found.config.get("base_model_name_or_path") or "an unnamed base"
        return f"warning: {found.path} does not say which weights it was made for (it names {made_for}); base is {base.name}"
    if found.base.dtype != base.dtype:
        return (
            f"warning: adapter made for {found.base.name} in {found.base.dtype}, base is {base.name} in {base.dtype}: "
            "their fingerprints cannot be compared"
        )
    if found.base.fingerprint != base.fingerprint:
        raise ModelError(
            f"the adapter was made for {found.base.name} (weights {found.base.fingerprint}), but the base is {base.name} "
            f"({base.fingerprint})",
            where=str(found.path),
            fix="set model.path and model.revision to the model that the adapter was trained on",
        )
    return ""


def file_name(name: str) -> str:
    """Return the file's name of a tensor: model.layers.0.q.lora_A → base_model.model.model.layers.0.q.lora_A.weight"""
    return f"{PREFIX}{file_layer(name)}{'.weight' if name.endswith(_MODULES) else ''}"


def live_name(name: str) -> str:
    """Return the inverse of file_name; other names are unchanged."""
    if not name.startswith(PREFIX):
        return name
    own = live_layer(name.removeprefix(PREFIX))
    short = own.removesuffix(".weight")
    return short if short.endswith(_MODULES) else own
