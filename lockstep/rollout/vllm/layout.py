"""Views of vLLM's parameters by the names and shapes of the Hugging Face checkpoint: fused matrices split, padding cut off.

vLLM's tensors differ from a checkpoint's: q, k and v in one matrix, gate and up in another, a vocabulary padded to a multiple
of 64 rows, a tied head that is the embedding, experts with outputs before inputs. Every tensor here is a view into vLLM's
memory, so that a fingerprint reads, and a write changes, the same memory that samples. Nothing here imports vLLM: modules are
recognised by their attributes (`packed_modules_mapping` of the model, `output_sizes` of a fused layer, `org_vocab_size` of a
padded one, `w13_weight` of experts; vLLM 0.24, model_executor/layers: linear.py, vocab_parallel_embedding.py and fused_moe).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lockstep.errors import EngineError
from lockstep.models.weights import stored_buffers
from lockstep.types import WeightStream

FIX = "set rollout.engine=native, which runs any decoder of transformers"
USUAL = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Fused matrices of vLLM models that do not declare them (Starcoder2)."""
MIXTURES = ("qwen3_moe", "gpt_oss")
"""Model types of mixtures whose names and layout here are those of transformers."""
EXPERTS = {
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
    "w13_bias": "gate_up_proj_bias",
    "w2_bias": "down_proj_bias",
}
"""Names of experts' tensors in transformers, by those in vLLM. Those of vLLM's Triton kernels have the order of Qwen3-MoE's."""
EXPERTS_MODULE = "routed_experts"
"""Last name of vLLM's module that holds them."""


def checkpoint_views(model: nn.Module) -> WeightStream:
    """Yield every parameter of vLLM's model once, tied ones under their first name, as views. Raises EngineError for a layout
    that cannot be mapped back: sharded over ranks, fused otherwise than by rows, or renamed by more than a prefix.
    """
    rename = _renaming(model)
    modules = dict(model.named_modules())
    packed: dict[str, list[str]] = USUAL | (getattr(model, "packed_modules_mapping", None) or {})
    for name, parameter in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        for piece, view in _pieces(layer, leaf, parameter.data, modules.get(layer), packed):
            yield rename(piece), view


def _pieces(
    layer: str, leaf: str, tensor: Tensor, module: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint tensors inside one parameter `leaf` of the module called `layer`."""
    if getattr(module, "tp_size", 1) != 1:
        raise EngineError(
            f"vLLM splits this layer over {module.tp_size} GPUs", where=f"{layer}.{leaf}", fix="use one GPU per engine"
        )
    parent, _, last = layer.rpartition(".")
    if last == EXPERTS_MODULE and leaf in EXPERTS:
        inputs_first = tensor.ndim == 3 and hasattr(module, "w13_bias")  # gpt-oss alone has biases, and this order
        yield f"{parent}.{EXPERTS[leaf]}", tensor.transpose(1, 2) if inputs_first else tensor
        return
    children = packed.get(last, [last])
    name = f"{layer}.{leaf}" if layer else leaf
    if (rows := getattr(module, "org_vocab_size", None)) is not None:
        yield name, tensor[:rows]
    elif len(children) < 2:
        yield name, tensor
    else:
        sizes: list[int] = list(getattr(module, "output_sizes", []))
        if len(sizes) != len(children) or sum(sizes) != tensor.shape[0]:
            raise EngineError(
                f"the fused matrix has the shape {list(tensor.shape)}, but {', '.join(children)} have {sizes} rows",
                where=name,
                fix=FIX,
            )
        for child, part in zip(children, tensor.split(sizes), strict=True):
            yield ".".join(filter(None, (parent, child, leaf))), part


def of_experts(name: str) -> bool:
    """Return whether a tensor of this name is of a mixture's experts."""
    return ".experts." in name and name.rpartition(".")[2] in EXPERTS.values()


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """Return a function from vLLM's parameter names to the checkpoint's: the inverse of the model's mapping."""
    mapper, where = getattr(model, "hf_to_vllm_mapper", None), type(model).__name__
    for part in ("orig_to_new_renamings", "orig_to_new_regex"):
        rules = getattr(mapper, part, None) or {}
        if any(new is not None for new in rules.values()) if isinstance(rules, dict) else rules:
            what = f"vLLM renames this model's parameters by {part}, which is not supported"
            raise EngineError(what, where=where, fix=FIX)
    ends, starts, inner = (_inverse(mapper, part, where) for part in ("suffix", "prefix", "substr"))

    def rename(name: str) -> str:
        name = next((name.removesuffix(new) + ends[new] for new in ends if name.endswith(new)), name)
        name = next((starts[new] + name.removeprefix(new) for new in starts if name.startswith(new)), name)
        return next((name.replace(new, inner[new], 1) for new in inner if new in name), name)

    return rename


def _inverse(mapper: Any, part: str, where: str) -> dict[str, str]:
    """Return the old texts of a mapping's rules by the new ones, the longest first. Raises EngineError if it has no inverse."""
    rules = getattr(mapper, f"orig_to_new_{part}", None) or {}
    # Experts have names of their own (EXPERTS); most of their rules are for checkpoints of other forms.
    pairs = [(new, old) for old, new in rules.items() if new is not None and not new.startswith((".w13_", ".w2_"))]
    inverse = dict(pairs)
    if "" in inverse:
        what = f"vLLM removes a {part} from parameter names, which is not supported"
        raise EngineError(what, where=where, fix=FIX)
    if len(inverse) < len(pairs):
        what = f"vLLM gives parameters of different names one name (orig_to_new_{part}), which is not supported"
        raise EngineError(what, where=where, fix=FIX)
    return {new: inverse[new] for new in sorted(inverse, key=len, reverse=True)}


def checked(stream: WeightStream, known: frozenset[str], model: str, folder: str) -> WeightStream:
    """Yield the stream while vLLM has a parameter for each tensor. Some of vLLM's loaders skip unknown names silently."""
    for name, tensor in stream:
        if name not in known:
            raise EngineError(
                f"vLLM's {model} has no parameter for {name} (of {len(known)}, the first is {min(known, default='none')})",
                where=folder,
                fix=FIX,
            )
        yield name, tensor


def share(model: nn.Module, views: WeightStream) -> list[str]:
    """Make the parameters of `model` views of an engine's tensors: one set of weights from then on. Returns their names.

    Names, shapes and dtypes must be equal and so must the values: nothing is copied. Raises EngineError otherwise, before
    anything is changed.
    """
    engine, own = dict(views), dict(model.named_parameters()) | dict(stored_buffers(model))
    if missing := sorted(engine.keys() ^ own.keys()):
        raise EngineError(
            f"learner and vLLM differ in {len(missing)} parameters, which one of them lacks: {', '.join(missing[:5])}",
            where="rollout.vllm",
            fix=FIX,
        )
    for name, parameter in own.items():
        view = engine[name]
        if (view.shape, view.dtype, view.device) != (parameter.shape, parameter.dtype, parameter.device):
            raise EngineError(
                f"vLLM's tensor is {tuple(view.shape)} {view.dtype} on {view.device}, the learner's {tuple(parameter.shape)} "
                f"{parameter.dtype} on {parameter.device}",
                where=name,
                fix="set rollout.vllm.transport=copy",
            )
        if not view.equal(parameter.data):
            raise EngineError(
                "the values in vLLM differ from the learner's",
                where=name,
                fix="load the learner's weights before sharing",
            )
    for name, parameter in own.items():
        parameter.data = engine[name]
    return sorted(own)
