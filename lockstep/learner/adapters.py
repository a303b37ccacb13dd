"""Adapters through PEFT, built in this one place."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, assert_never

import torch

from lockstep.config.schema import Adapter, Lora, NoAdapter
from lockstep.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attach(model: PreTrainedModel, adapter: Adapter, seed: int) -> torch.nn.Module:
    """The model that is trained: the model itself, or a PEFT model around it whose base is frozen.

    Adapter weights have the base's dtype (the optimizer keeps their fp32 masters). Raises ModelError for unknown targets.
    """
    match adapter:
        case NoAdapter():
            return model
        case Lora():
            return _attach_lora(model, adapter, seed)
        case _:
            assert_never(adapter)


def describe(adapter: Adapter, model: torch.nn.Module) -> str:
    """One line for the log: what is trained and at which scaling."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = f"{trained:,} of {total:,} parameters are trained ({trained / total:.1%})"
    match adapter:
        case NoAdapter():
            return f"full training: {share}"
        case Lora():
            return f"LoRA rank {adapter.rank}, scaling = alpha / rank = {adapter.alpha / adapter.rank:g}: {share}"
        case _:
            assert_never(adapter)


def _attach_lora(model: PreTrainedModel, adapter: Lora, seed: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    from lockstep.learner.lora_linear import LoraLinear

    targets = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    if not isinstance(targets, str):
        _require_linear(model, targets)
    # PEFT takes either; its types say int.
    alpha: Any = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with warnings.catch_warnings():  # PEFT asks transformers for a name that it is about to rename
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            attached = get_peft_model(model, config, autocast_adapter_dtype=False)
    return attached.eval()


def _require_linear(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise ModelError unless every target names linear layers: PEFT passes over a name that nothing has."""
    modules = list(model.named_modules())
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    for target in targets or [""]:
        matched = [name for name, _ in modules if f".{name}".endswith(f".{target}")]
        if not matched or set(matched) - set(linear):
            raise ModelError(
                f"{target!r} names no linear layer of {type(model).__name__}",
                where="adapter.targets",
                fix=f"linear layers here: {', '.join(sorted({name.rsplit('.', 1)[-1] for name in linear}))}",
            )
