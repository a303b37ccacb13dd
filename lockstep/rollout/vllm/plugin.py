"""Registers Lockstep's fake quantisation (quantised.py) with vLLM 0.24, by register_quantization_config."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.rollout.vllm.quantised import FakeQuantised, Plan, Switch, checkpoint_names, excluded

NAME = "lockstep_fake_quantised"
"""Value of vLLM's `quantization` argument."""

_plan: list[Plan] = []
"""Plan of the engine that is being started: vLLM creates the configuration itself, without arguments."""


def register(plan: Plan) -> str:
    """Make vLLM build the next engine of this process with quantised layers; returns the value of its `quantization` argument.

    Raises EngineError for a plan that no captured step can have.
    """
    _ = plan.inputs
    _plan[:] = [plan]
    _config_class()
    return NAME


@cache
def _method_class() -> type:
    from vllm.model_executor.layers.linear import (
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )

    class LockstepLinearMethod(FakeQuantised, LinearMethodBase):  # type: ignore[misc]
        """Method of a quantised linear layer. It does not derive from vLLM's unquantised method, because some of vLLM's code
        bypasses that method and uses the weight itself.
        """

        def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
            UnquantizedLinearMethod().create_weights(layer, *sizes, **attributes)
            self.attach(layer)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return self.product(layer, x, bias)

    register_weight_loader_v2_supported_method(LockstepLinearMethod)
    return LockstepLinearMethod


@cache
def _config_class() -> type:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class LockstepQuantisation(QuantizationConfig):  # type: ignore[misc]
        """Gives the method above to every linear layer except routers and excluded ones."""

        def __init__(self) -> None:
            super().__init__()
            self.plan, self.switch = _plan[0], Switch()

        def get_name(self) -> str:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float32, torch.float16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 80

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> LockstepQuantisation:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None  # embeddings, head, attention, experts: unquantised
            names = checkpoint_names(prefix, self.packed_modules_mapping)
            if excluded(names, self.plan.exclude):
                return UnquantizedLinearMethod()
            return _method_class()(self.plan, self.switch, len(names))

    register_quantization_config(NAME)(LockstepQuantisation)
    return LockstepQuantisation
