"""Adapters through PEFT, built in this one place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

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


def load_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Copy the adapter weights of a PEFT folder into an attached model, bit by bit."""
    from peft.utils.save_and_load import set_peft_model_state_dict
    from safetensors.torch import load_file

    outcome = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    if outcome.unexpected_keys:
        raise ModelError(
            f"the adapter has {len(outcome.unexpected_keys)} tensors that this model lacks, such as {outcome.unexpected_keys[0]}",
            where=str(folder),
            fix="use the base model and the targets that it was made with",
        )


def _attach_lora(model: PreTrainedModel, adapter: Lora, seed: int) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    from lockstep.learner.lora_linear import LoraLinear

    targets = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    if not isinstance(targets, str):
        _require_linear(model, targets)
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
    config = LoraConfig(
        r=adapter.rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"  # type: ignore[arg-type]
    )
    config._register_custom_module({torch.nn.Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attached = get_peft_model(model, config, autocast_adapter_dtype=False)
    dtype = next(model.parameters()).dtype
    for parameter in attached.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
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
