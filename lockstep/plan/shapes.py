"""The sizes of a model that plans compute with: layers, heads, vocabulary, number of parameters."""

from __future__ import annotations

from dataclasses import dataclass

NF4_BYTES, MXFP4_BYTES = 0.5 + 1 / 32, 0.5 + 2 / 32
"""Bytes of a weight in 4 bits with its share of a scale, as they lie in memory."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a decoder layer. Example: Linear("k_proj", 256, 1536)"""

    name: str
    outputs: int
    inputs: int

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. `parameters` counts tied weights once."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP; of one expert where there are experts."""
    vocab: int
    tied: bool
    """The head's weight is the embedding."""
    parameters: int
    linears: tuple[Linear, ...]
    """nn.Linear layers of one decoder layer: what adapter.targets = all-linear means. Where layers differ, one of each name."""
    experts: int = 0
    """Experts of a layer; 0 is a dense MLP."""
    experts_per_token: int = 0
    expert_bytes: float = 2.0
    """Bytes of a weight of theirs that decoding reads; of the MLP, if it is dense."""
    grouped: bool = False
    """On a GPU they run by models.experts."""
    qk_norm: bool = False
    """Queries and keys are normalised per head (Qwen3, Gemma 3)."""
    window: int | None = None
    """Sliding-window layers see this many tokens."""
    windowed: int = 0
    """Number of those layers."""
    softcap: bool = False
    """Attention scores are capped (Gemma 2)."""
    sinks: bool = False
    """Each head has a score of its own in the softmax (gpt-oss)."""
    norms: int = 2
    """Norms of a layer, those of heads apart."""
    every_linear: tuple[Linear, ...] = ()
    """Those of all layers, where layers differ in them."""
    cached: int = 0
    """Numbers of keys and values of one token in all layers, where layers differ in them, or a value from a key; else 0."""
    state: int = 0
    """Bytes of what layers with a state hold of one sequence."""
    context: int | None = None
    """Longest sequence, if the model states one."""

    @property
    def all_linears(self) -> tuple[Linear, ...]:
        return self.every_linear or self.linears * self.layers

    @property
    def query_size(self) -> int:
        """d_a of the formulas: query heads × head size."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def head(self) -> int:
        """Parameters of the head's matrix."""
        return self.hidden * self.vocab

    @property
    def attention_body(self) -> int:
        """Parameters of the attention matrices of all layers."""
        return self.layers * (2 * self.hidden * self.query_size + 2 * self.hidden * self.kv_size)

    @property
    def body(self) -> int:
        """Parameters of the layers' matrices that one token passes: with experts, those that it is sent to."""
        active = max(1, self.experts_per_token)
        router = self.layers * self.hidden * self.experts
        return self.attention_body + router + self.layers * active * 3 * self.hidden * self.intermediate

    def body_bytes(self, tokens: float) -> float:
        """Bytes of the layers' matrices that a step over `tokens` tokens reads: of experts, as many as they can reach."""
        reached = min(self.experts, tokens * self.experts_per_token) if self.experts else 1
        router = self.layers * self.hidden * self.experts
        read = self.layers * reached * 3 * self.hidden * self.intermediate
        return 2.0 * (self.attention_body + router) + self.expert_bytes * read

    def kv_bytes(self, element: int = 2) -> int:
        """Bytes of keys and values of one token, all layers."""
        return (self.cached or 2 * self.layers * self.kv_size) * element

    def adapter_parameters(self, rank: int, targets: str | list[str] = "all-linear") -> int:
        """Parameters of LoRA matrices of `rank` on the named layers."""
        chosen = [x for x in self.all_linears if targets == "all-linear" or x.name in targets]
        return sum(rank * (linear.inputs + linear.outputs) for linear in chosen)
