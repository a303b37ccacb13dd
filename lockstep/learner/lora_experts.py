"""LoRA on the experts of a mixture, saved as PEFT saves it for `target_parameters`.

PEFT's own module adds B·A of all experts to their matrices in every forward pass. Here each product is x W + s · (x A) B by
expert, on a GPU in the kernels of models.experts. Switching adapters on and off is PEFT's.

PEFT's names in files are those of two wrappers around the experts, the inner one for gate and up. Its A is [E·R, X] and its B
[O, R·E] with experts side by side.

Legend: E experts, R rank, O outputs, X inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lockstep.config.adapter import Lora
from lockstep.errors import ModelError
from lockstep.models.known import kind_of_experts
from lockstep.models.low_rank import ADAPTERS, LowRank, is_transposed, sizes_of
from lockstep.numerics.experts import mix

TARGETS = tuple(f"experts.{parameter}" for parameter in sorted(ADAPTERS))
"""Value of `target_parameters` in adapter_config.json."""
_FILES = {
    f".experts.{ADAPTERS['gate_up_proj']}.": ".experts.base_layer.",
    f".experts.{ADAPTERS['down_proj']}.": ".experts.",
}


class _Stack(nn.Module):
    """Holder of matrices, named like those of PEFT's layers."""

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrices)


class ExpertsAdapter(nn.Module, BaseTunerLayer):
    """The adapter of one of the two products of a layer's experts."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, experts: nn.Module, parameter: Literal["gate_up_proj", "down_proj"]) -> None:
        super().__init__()
        self._sizes = sizes_of(experts, parameter)
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}

    @property
    def weight(self) -> Tensor:
        """PEFT's layers have their base's; this one has none."""
        raise AttributeError("weight")

    bias = weight

    def add(self, name: str, rank: int, scaling: float, like: Tensor, *, gaussian: bool = False) -> None:
        """Add an adapter whose A is drawn as PEFT draws it, and whose B is 0."""
        count, outputs, inputs, transposed = self._sizes
        down_ERX = torch.empty(count, rank, inputs)
        if gaussian:
            nn.init.normal_(down_ERX, std=1 / rank)
        else:
            nn.init.uniform_(down_ERX, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))
        down = down_ERX.transpose(1, 2).contiguous() if transposed else down_ERX
        up = torch.zeros(count, rank, outputs) if transposed else torch.zeros(count, outputs, rank)
        self.lora_A[name], self.lora_B[name] = (_Stack(one.to(like.device, like.dtype)) for one in (down, up))
        self.scaling[name] = scaling
        self.set_adapter([name])

    def active(self) -> LowRank | None:
        """Return the matrices of the adapter that is on; None without one."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or not names:
            return None
        down, up = (cast(Tensor, kind[names[0]].weight) for kind in (self.lora_A, self.lora_B))
        if is_transposed(down):
            down, up = down.transpose(1, 2), up.transpose(1, 2)
        return LowRank(down, up, self.scaling[names[0]])


class _AdaptedForward:
    """Replacement of the forward of experts that no kernel runs. It is a class so that a copy of the model copies it, too."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mix(self.module, None, (None, None), hidden_states, top_k_index, top_k_weights)


def attach_to_experts(model: nn.Module, name: str, rank: int, scaling: float, *, gaussian: bool = False) -> None:
    """Add an adapter of this name to all experts. Raises ModelError as `adapted_experts`."""
    for experts in adapted_experts(model, rank):
        like = next(parameter for parameter in experts.parameters() if parameter.is_floating_point())
        for parameter, own in ADAPTERS.items():
            if own not in experts._modules:
                experts.add_module(own, ExpertsAdapter(experts, cast(Any, parameter)))
            cast(ExpertsAdapter, experts._modules[own]).add(name, rank, scaling, like, gaussian=gaussian)
        if "forward" not in experts.__dict__:
            replaced: Any = experts
            replaced.forward = _AdaptedForward(experts)


def adapted_experts(model: nn.Module, rank: int) -> list[nn.Module]:
    """Return the modules of a model's experts. Raises ModelError if there are none, or one cannot have adapters of this rank."""
    named = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    odd = sorted(name for name, module in named.items() if kind_of_experts(module) is None)
    if odd or not named:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        raise ModelError(
            f"{odd[0]} is of a form that cannot have adapters" if odd else f"{type(base).__name__} has no experts",
            where="adapter.expert_rank",
            fix="set adapter.expert_rank=0",
        )
    sizes = [sizes_of(module, cast(Any, name)) for module in named.values() for name in ADAPTERS]
    if rank >= (smallest := min(min(outputs, inputs) for _, outputs, inputs, _ in sizes)):
        raise ModelError(
            f"rank {rank} is not below {smallest}, the smallest size of the experts' matrices",
            where="adapter.expert_rank",
            fix=f"set adapter.expert_rank below {smallest}",
        )
    return list(named.values())


def describe_targets(adapter: Lora, content: dict[str, Any]) -> None:
    """Write the experts' adapters into what becomes adapter_config.json."""
    if adapter.expert_rank:
        content["target_parameters"] = list(TARGETS)
        content["rank_pattern"] = dict.fromkeys(TARGETS, adapter.expert_rank)


def has_adapted_experts(config: Mapping[str, Any]) -> bool:
    """Return whether adapter_config.json has adapters on experts, and ranks of its own for nothing else."""
    named, ranked = config.get("target_parameters"), config.get("rank_pattern") or {}
    if not (isinstance(named, list) and isinstance(ranked, dict)):
        return False
    targets, ranks = ({str(one).rpartition("experts.")[2] for one in found} for found in (named, ranked))
    return targets == ADAPTERS.keys() and ranks <= ADAPTERS.keys() | {"experts"}


def rank_on_experts(config: Mapping[str, Any]) -> Any:
    """Return the rank of the experts' adapters from adapter_config.json, as it is written there."""
    return _pattern(config, "rank_pattern", config.get("r", 8))


def scaling_on_experts(config: Mapping[str, Any]) -> float:
    """Return the scaling of the experts' adapters from adapter_config.json, whose ranks are numbers."""
    rank, alpha = rank_on_experts(config), _pattern(config, "alpha_pattern", config.get("lora_alpha", 8))
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _pattern(config: Mapping[str, Any], name: str, usual: Any) -> Any:
    """Return the value for the experts from a setting of PEFT's whose keys are ends of names."""
    return next(
        (v for k, v in (config.get(name) or {}).items() if k.endswith(tuple(ADAPTERS)) or k == "experts"), usual
    )


# --- files ----------------------------------------------------------------------------------------------------------
def in_experts(name: str) -> bool:
    """Return whether a tensor of ours belongs to an adapter on experts."""
    return any(own in name for own in _FILES)


def file_layer(name: str) -> str:
    """Return PEFT's name of a tensor; other names are unchanged. Example: …experts.gate_up_adapter.lora_A →
    …experts.base_layer.lora_A
    """
    for own, theirs in _FILES.items():
        name = name.replace(own, theirs)
    return name


def live_layer(name: str) -> str:
    """Return the inverse of file_layer."""
    for own, theirs in _FILES.items():
        if f"{theirs}lora_" in name:
            return name.replace(theirs, own)
    return name


def to_file(name: str, tensor: Tensor) -> Tensor:
    """Return a matrix as PEFT saves it. Those of other layers are unchanged."""
    if tensor.ndim != 3:
        return tensor
    rank = min(tensor.shape[1:])
    if name.endswith(".lora_A"):
        down_ERX = tensor if tensor.shape[1] == rank else tensor.transpose(1, 2)
        return down_ERX.reshape(-1, down_ERX.shape[2])
    up_ORE = tensor.permute(1, 2, 0) if tensor.shape[2] == rank else tensor.permute(2, 1, 0)
    return up_ORE.reshape(len(up_ORE), -1)


def from_file(name: str, tensor: Tensor, own: Tensor) -> Tensor:
    """Return a matrix that PEFT saved in the layout of `own`. One that does not fit is unchanged, and so are other layers'."""
    if own.ndim != 3 or tensor.ndim != 2 or tensor.numel() != own.numel():
        return tensor
    count, rank, down = len(own), min(own.shape[1:]), name.endswith(".lora_A")
    wanted = (count * rank, max(own.shape[1:])) if down else (max(own.shape[1:]), rank * count)
    if tuple(tensor.shape) != wanted:
        return tensor
    if down:
        down_ERX = tensor.view(count, rank, -1)
        return (down_ERX if own.shape[1] == rank else down_ERX.transpose(1, 2)).contiguous()
    up_ORE = tensor.reshape(-1, rank, count)
    return up_ORE.permute(2, 0, 1).contiguous() if own.shape[2] == rank else up_ORE.permute(2, 1, 0).contiguous()
