"""Random models of a few thousand weights, one per architecture, and what plain transformers makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import transformers as hf
from torch import Tensor, nn

from lockstep.models.attention import NAME
from lockstep.models.states import follow_layouts
from lockstep.models.weights import named_weights, stored_buffers
from lockstep.types import Batch, Loss, Metrics, TokenIds, WeightStream

VOCAB = 300
WINDOW = 8
"""Of the families with sliding windows: sequences of the tests are longer."""

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # distributions far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _make(name: str, **more: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(hf, f"{name}TextConfig", None) or getattr(hf, f"{name}Config")
        return getattr(hf, f"{name}ForCausalLM")(config(**(SMALL | more)))  # type: ignore[no-any-return]

    return build


LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
"""Latent attention: keys of 24, values of 20."""
DELTA = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
"""A layer with a gated delta net, then one with attention."""
STATES = ("qwen3-next", "qwen3.5")

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _make("Llama"),
    "llama-mqa": _make("Llama", num_key_value_heads=1),
    "llama-tied": _make("Llama", tie_word_embeddings=True),
    "qwen2": _make("Qwen2"),
    "qwen3": _make("Qwen3", head_dim=16),
    "mistral": _make("Mistral", sliding_window=WINDOW),
    "gemma2": _make(
        "Gemma2",
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _make("Gemma3", head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gpt-oss": _make("GptOss", head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": _make("Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    "mixtral": _make("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "glm4-moe": _make(  # a stored buffer decides which experts a token is sent to
        "Glm4Moe",
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "cohere": _make("Cohere", logit_scale=0.5),
    "granite": _make("Granite", logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.5),
    "phi": _make("Phi"),  # a head with a bias
    "phi3": _make("Phi3", sliding_window=WINDOW),  # one layer for query, key and value, and one for gate and up
    "gemma": _make("Gemma", head_dim=16),
    "glm4": _make("Glm4", head_dim=16),  # half of each head is rotated, neighbours together
    "smollm3": _make("SmolLM3", no_rope_layers=[1, 0]),
    "starcoder2": _make("Starcoder2", sliding_window=WINDOW),  # LayerNorm: float64 throughout
    "gemma4": _make(  # two sizes of heads, and other numbers of them; the last layer has the third's keys and values
        "Gemma4",
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=WINDOW,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
    "deepseek-v3": _make("DeepseekV3", **LATENT, n_group=1, topk_group=1, first_k_dense_replace=1),
    "glm4-moe-lite": _make("Glm4MoeLite", **LATENT, n_group=1, topk_group=1, mlp_layer_types=["dense", "sparse"]),
    "qwen3-next": _make(
        "Qwen3Next",
        **DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    ),
    "qwen3.5": _make("Qwen3_5", **DELTA),
}


def plain(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
    """The model as transformers runs it. Biases, sinks and other vectors are random too, so that each of them matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FAMILIES[family]()
        for tensor in (*model.parameters(), *(buffer for _, buffer in stored_buffers(model))):
            if tensor.dim() == 1:
                tensor.data += 0.2 * torch.randn_like(tensor)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return _with_attention(model.eval(), attention)


def twin(model: nn.Module) -> nn.Module:
    """The same weights in another model that attends as Lockstep does."""
    model = _with_attention(copy.deepcopy(model), NAME)
    follow_layouts(model)
    return model


def _with_attention(model: nn.Module, name: str) -> nn.Module:
    model.config._attn_implementation = name  # type: ignore[union-attr]
    return model


def logits_of(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """All logits [T, V] of one sequence by transformers' own forward pass, without cache, padding or packing."""
    device = next(model.parameters()).device
    output: Tensor = model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0]
    return output if output.dtype == torch.float64 else output.float()


@torch.no_grad()
def logprobs_of(model: nn.Module, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probability of every token but the first, [T - 1]."""
    logprobs_TV = (logits_of(model, ids)[:-1] / temperature).log_softmax(-1)
    return logprobs_TV.cpu().gather(-1, torch.tensor(list(ids))[1:, None])[:, 0]


def tokens(count: int, seed: int, low: int = 3, high: int = VOCAB) -> tuple[int, ...]:
    """Random ids, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(low, high, (count,), generator=generator).tolist())


class ByHand:
    """A learner of a model that a test changes by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.version = model, 0

    def logprobs(self, sequences: Sequence[TokenIds]) -> list[tuple[float, ...]]:
        return [tuple(logprobs_of(self.model, ids).tolist()) for ids in sequences]

    def update(self, batch: Batch, loss: Loss) -> Metrics:
        raise NotImplementedError

    def weights(self) -> WeightStream:
        return named_weights(self.model)


def wide(family: str) -> nn.Module:
    """In float64 throughout: transformers' own RMS norms round to fp32, torch's do not."""
    model = plain(family, dtype=torch.float64, attention="sdpa")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.numel(), eps=1e-6, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model
