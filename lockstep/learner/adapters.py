"""Builds the adapters of a run with PEFT."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor

from lockstep.config.adapter import Adapter, Lora, NoAdapter, OtherPeft, adapter_name
from lockstep.errors import ModelError
from lockstep.learner.adapter_continue import OURS, take_saved
from lockstep.learner.adapter_files import Base, check_base, in_own_layout, read_adapter, trained_tensors
from lockstep.learner.adapter_start import (
    START_A,
    START_B,
    has_residual_base,
    lora_layers,
    set_start,
    start_from_weights,
    start_of,
)
from lockstep.learner.adapter_targets import Chosen, choose_targets, trained_share
from lockstep.learner.lora_experts import attach_to_experts
from lockstep.models.merged_weights import MergedWeight
from lockstep.models.nf4 import Nf4Linear
from lockstep.models.stored import weights_of
from lockstep.models.weights import clean_name, named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = {
    "ia3": "IA3Config", "vera": "VeraConfig", "oft": "OFTConfig", "boft": "BOFTConfig", "hra": "HRAConfig",
    "loha": "LoHaConfig", "lokr": "LoKrConfig", "miss": "MissConfig", "delora": "DeloraConfig", "randlora": "RandLoraConfig",
}  # fmt: skip
"""Names of PEFT's config classes."""
AWAY = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Share by which an adapter's start may change a layer's output: the size of rounding."""
AWAY_ROUNDED = 0.05
"""The same share in bf16, where reflections that should cancel leave one percent."""
DOWN = ("down_proj", "fc2", "dense_4h_to_h", "c_proj", "wo", "w2")
"""Last names of an MLP's second matrix, whose input IA3 scales."""
_FACTS = "lockstep_adapter"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model's adapter since it was attached; stored on the model."""

    base: Base
    """The original base. An adapter's checkpoint names it."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""
    reference: Mapping[str, Tensor] | None = None
    """The adapter of the reference policy; None if the reference is the base with its adapters off."""


def attach(model: PreTrainedModel, adapter: Adapter, seed: int, base: Base | None = None) -> torch.nn.Module:
    """Return the trained model: the model itself, or a PEFT model around it whose base is frozen.

    Adapter weights have the base's dtype (the optimizer keeps their fp32 masters). `base` describes this model and is computed
    here if it is not given. Raises ModelError for unknown targets or options, or an adapter.start that does not fit.
    """
    if isinstance(adapter, NoAdapter):
        return model
    base = base or Base.of(model, str(getattr(model, "name_or_path", "")))
    chosen = choose_targets(model, adapter.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with warnings.catch_warnings():  # PEFT asks transformers for a name that transformers will rename
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            attached = _peft_model(model, adapter, chosen).eval()
        if isinstance(adapter, Lora) and adapter.expert_rank:
            scaling, gaussian = adapter.scaling_of(adapter.expert_rank), adapter.init == "gaussian"
            attach_to_experts(attached, "default", adapter.expert_rank, scaling, gaussian=gaussian)
    notes = [*chosen.notes]
    start = read_adapter(Path(adapter.start)) if adapter.start else None
    if start is not None:
        if warning := check_base(start, base):
            notes.append(warning)
        take_saved(attached, adapter, start)
        notes.append(f"adapter starts from {start.path}")
    elif isinstance(adapter, OtherPeft):
        _require_base_start(attached)
    elif isinstance(adapter, Lora) and (adapter.init == "pissa" or adapter.init == "olora"):
        notes.append(start_from_weights(attached, adapter, adapter.init, base.fingerprint))
    if isinstance(adapter, Lora) and adapter.base == "nf4":
        notes.append(_pack_base(attached))
    if isinstance(adapter, Lora) and adapter.merged:
        notes.append(_merge_weights(attached))
    begun = start is not None or any(start_of(layer) for layer in lora_layers(attached).values())
    reference = {name: tensor.clone() for name, tensor in trained_tensors(attached)} if begun else None
    setattr(attached, _FACTS, Facts(base, tuple(notes), reference))
    return attached


@torch.no_grad()
def _pack_base(model: torch.nn.Module) -> str:
    """Store the frozen layers under adapters in 4 bits. Returns a line for the log."""
    layers = lora_layers(model).values()
    before = sum(layer.base_layer.weight.nbytes for layer in layers)
    for layer in layers:
        layer.base_layer = Nf4Linear(layer.base_layer)
    after = sum(layer.base_layer.codes.nbytes + layer.base_layer.scales.nbytes for layer in layers)
    return f"{len(layers)} frozen layers in NF4: {before / 2**20:,.0f} MiB became {after / 2**20:,.0f} MiB"


def _merge_weights(model: torch.nn.Module) -> str:
    """Let linear layers compute with their adapter merged in; those of experts stay apart. Returns a line for the log."""
    from lockstep.learner.lora_linear import LoraLinear

    layers: list[Any] = [layer for layer in lora_layers(model).values() if isinstance(layer, LoraLinear)]
    for layer in layers:
        layer.merged_weight = MergedWeight(layer)
    return f"{len(layers)} layers compute with their adapter merged into their weight"


def facts_of(model: torch.nn.Module) -> Facts | None:
    """Return the facts of a model's adapter; None for a model without an adapter of ours."""
    facts: Facts | None = getattr(model, _FACTS, None)
    return facts


def describe(adapter: Adapter, model: torch.nn.Module) -> str:
    """Return a line for the log: the trained part, its scaling, and notes from attaching it."""
    frozen = sum(
        p.numel() if p.is_floating_point() else weights_of(n, p.nbytes, packed=True)
        for n, p in model.named_parameters()
        if not p.requires_grad
    )
    share = trained_share(sum(p.numel() for p in model.parameters() if p.requires_grad), frozen)
    match adapter:
        case NoAdapter():
            return f"full training: {share}"
        case Lora():
            root = "√rank" if adapter.rslora else "rank"
            line = f"{adapter_name(adapter)}, scaling = alpha / {root} = {adapter.scaling:g}: {share}"
        case OtherPeft():
            line = f"{adapter_name(adapter)}, {_options(adapter) or 'default options'}: {share}"
        case _:
            assert_never(adapter)
    facts = facts_of(model)
    return "\n".join([line, *(facts.notes if facts else ())])


@contextmanager
def as_reference(model: Any) -> Iterator[torch.nn.Module]:
    """Turn the model into the reference policy inside the block: its adapter off, or at its start (PiSSA, OLoRA,
    adapter.start).
    """
    facts = facts_of(model)
    if facts is None or facts.reference is None:
        with model.disable_adapter():
            yield model
        return
    own = {name: p for name, p in _trained_parameters(model).items() if name in facts.reference}
    kept = {name: parameter.data for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            parameter.data = facts.reference[name].to(parameter.device)
        yield model
    finally:
        for name, parameter in own.items():
            parameter.data = kept[name]


def adopt_starts(
    model: torch.nn.Module, weights: Mapping[str, Tensor], originals: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Give the base the residual that saved weights were trained on; returns the weights without their starts, in the layout of
    the model's own.

    `originals` yields the original base by name; it is called only if the model began at other factors than the saved run, for
    example because they were computed again on another machine. Raises ModelError if only one side has a start.
    """
    layers, weights = lora_layers(model), in_own_layout(weights, dict(named_weights(model)))
    starts = {name: tensor for name, tensor in weights.items() if name.endswith((START_A, START_B))}
    if bool(starts) != has_residual_base(model):
        raise ModelError(
            "the saved adapter "
            + ("began" if starts else "did not begin")
            + " as part of its base's weights (pissa, olora), but the recipe's adapter "
            + ("does not" if starts else "does"),
            where="adapter.init",
            fix="use the adapter settings with which the checkpoint was trained",
        )
    own = {name: start_of(layer) for name, layer in layers.items()}
    same = all(
        start is None or (_same(starts.get(name + START_A), start[0]) and _same(starts.get(name + START_B), start[1]))
        for name, start in own.items()
    )
    if not same:
        base = originals()
        for name, layer in layers.items():
            weight = layer.get_base_layer().weight
            with torch.no_grad():
                weight.copy_(base[f"{name}.weight"])
            set_start(layer, *(starts[name + part].to(weight.device) for part in (START_A, START_B)))
        _restart_reference(model, starts)
    return {name: tensor for name, tensor in weights.items() if name not in starts}


def _same(saved: Tensor | None, own: Tensor) -> bool:
    return saved is not None and saved.shape == own.shape and torch.equal(saved.to(own.device), own)


def _restart_reference(model: torch.nn.Module, starts: Mapping[str, Tensor]) -> None:
    """Set other start factors for the reference policy; the rest of it is unchanged."""
    facts = facts_of(model)
    if facts is not None and facts.reference is not None:
        own = {name.replace(".lora_start_", ".lora_"): tensor for name, tensor in starts.items()}
        reference = {name: own.get(name, kept).to(kept.device) for name, kept in facts.reference.items()}
        setattr(model, _FACTS, Facts(facts.base, facts.notes, reference))


def _trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {clean_name(name): p for name, p in model.named_parameters() if p.requires_grad}


# --- PEFT -----------------------------------------------------------------------------------------------------------
def _peft_model(model: PreTrainedModel, adapter: Lora | OtherPeft, chosen: Chosen) -> torch.nn.Module:
    from peft import get_peft_model

    attached: torch.nn.Module
    match adapter:
        case Lora():
            config = _lora_config(adapter, chosen.spelled(model))
            attached = get_peft_model(model, config, autocast_adapter_dtype=False)
        case OtherPeft():
            try:
                config = _other_config(adapter, chosen, model)
                with _as_asked(adapter):
                    attached = get_peft_model(model, config, autocast_adapter_dtype=False)
            except _REJECTS as error:
                raise ModelError(
                    f"PEFT rejects these options: {error}",
                    where="adapter.options",
                    fix="change the option that PEFT names",
                ) from error
        case _:
            assert_never(adapter)
    return attached


_REJECTS = (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ArithmeticError, Warning)
"""Errors and warnings with which PEFT rejects options."""


@contextmanager
def _as_asked(adapter: OtherPeft) -> Iterator[None]:
    """Raise PEFT's warning inside the block when PEFT would replace an option's value and only warn."""
    with warnings.catch_warnings():
        for name in adapter.options:
            warnings.filterwarnings("error", message=f"Invalid `{re.escape(name)}`")
            warnings.filterwarnings("error", message=rf"The symmetric initialization .* when {re.escape(name)} is odd")
            warnings.filterwarnings("error", message=rf"The following .*{re.escape(name)}.* did not match")
        yield


@torch.no_grad()
def _require_base_start(model: torch.nn.Module) -> None:
    """Raise ModelError if a fresh adapter changes its layer's output: step 0 and the reference must equal the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        weight: Any = layer.get_base_layer().weight
        draw = torch.Generator().manual_seed(0)
        x_TI = torch.randn(4, weight.shape[1], generator=draw).to(weight.device, weight.dtype)
        base_TO, own_TO = layer.get_base_layer()(x_TI), layer(x_TI)  # type: ignore[operator]
        if (share := float((own_TO - base_TO).norm() / base_TO.norm())) > AWAY.get(weight.dtype, AWAY_ROUNDED):
            raise _away(f"the output of {clean_name(name)} changes by {share:.1%}")


def _away(why: str) -> ModelError:
    return ModelError(
        f"the new adapter would change the base's results, but step 0 and the reference must equal the base: {why}",
        where="adapter.options",
        fix="leave out the option that sets the adapter's first values",
    )


def _lora_config(adapter: Lora, targets: list[str]) -> Any:
    from peft import LoraConfig

    from lockstep.learner.lora_linear import LoraLinear

    # PEFT takes either; its types say int.
    alpha: Any = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    init: Any = adapter.init if adapter.init in ("gaussian", "orthogonal") else True
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        target_modules=targets,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        init_lora_weights=init,
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    return config


def _other_config(adapter: OtherPeft, chosen: Chosen, model: PreTrainedModel) -> Any:
    import peft

    kind: Any = getattr(peft, METHODS[adapter.method])
    known = sorted({field.name for field in fields(kind) if field.init} - set(OURS))
    for name in adapter.options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ModelError(
                f"{adapter.method} has no option {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
                where="adapter.options",
                fix=f"choose among its options: {', '.join(known)}",
            )
    if idle := [name for name, value in adapter.options.items() if name.endswith("dropout") and value]:
        raise ModelError(
            f"{idle[0]} would have no effect: dropout is always off, so that training and sampling compute the same",
            where="adapter.options",
            fix=f"leave {idle[0]} out",
        )
    if not adapter.options.get("init_weights", True):
        raise _away("adapter.options has init_weights=false")
    targets = chosen.spelled(model)
    own: dict[str, Any] = {"target_modules": targets, "task_type": "CAUSAL_LM"}
    if adapter.method == "ia3" and "feedforward_modules" not in adapter.options:
        own["feedforward_modules"] = [name for name in targets if name.rsplit(".", 1)[-1] in DOWN]
    if adapter.method in ("vera", "randlora"):
        own["save_projection"] = False  # random matrices that follow from a key in the config
    return kind(**(own | adapter.options))


def _options(adapter: OtherPeft) -> str:
    return ", ".join(f"{name} = {value}" for name, value in adapter.options.items())
