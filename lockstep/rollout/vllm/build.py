"""Builds a recipe's vLLM engine: in this process or a separate one, with its own weights or the learner's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn

from lockstep.config.schema import Recipe
from lockstep.errors import EngineError
from lockstep.models.mxfp4 import is_mxfp4
from lockstep.rollout.allocator import fix_segments
from lockstep.rollout.requests import Decode
from lockstep.rollout.vllm.environment import prepare
from lockstep.rollout.vllm.settings import settings_of
from lockstep.types import RolloutEngine


def prepare_environment() -> None:
    """Set up this process's environment for vLLM. Call before anything is allocated on the GPU.

    Raises EngineError if it is too late to remove a setting.
    """
    prepare(os.environ, cuda_started=torch.cuda.is_initialized())
    fix_segments(os.environ)


def vllm_engine(
    recipe: Recipe, model: nn.Module, folder: str, stop_ids: frozenset[int], decode: Decode
) -> RolloutEngine:
    """Start vLLM for `model`, which the learner trains; with transport view its parameters become views of vLLM's tensors.

    Call before anything keeps the model's tensors. Raises EngineError if vLLM cannot run it here.
    """
    weight = next(model.parameters())
    if weight.device.type != "cuda":
        raise EngineError("vLLM needs a CUDA GPU", where="rollout.engine=vllm", fix="set rollout.engine=native")
    outer: Any = model
    base: Any = outer.get_base_model() if hasattr(model, "get_base_model") else outer
    if is_mxfp4(Path(folder)):
        raise EngineError(
            "vLLM would sample with this checkpoint's MXFP4 weights, but training uses dequantised ones",
            where=folder,
            fix="set rollout.engine=native, or save the dequantised model into a folder and set model.path to it",
        )
    settings = settings_of(
        recipe,
        folder,
        base.config,
        dtype=str(weight.dtype).removeprefix("torch."),
        stop_ids=stop_ids,
        gpu_bytes=torch.cuda.get_device_properties(weight.device).total_memory,
    )
    if recipe.rollout.vllm.process == "own":
        from lockstep.rollout.vllm.process import vllm_process

        return vllm_process(settings, weight.device, through_host=recipe.weight_transport == "copy")
    from lockstep.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(settings, decode)
    match recipe.weight_transport:
        case "view":
            engine.share(model)
        case "copy":
            pass
        case "ipc" | "shared":
            raise EngineError(
                f"the transport {recipe.weight_transport} needs vLLM in a separate process",
                where="rollout.vllm.transport",
                fix="set rollout.vllm.process=own",
            )
        case other:
            assert_never(other)
    return engine
