"""Aggregates per-token losses to one number, by one weight per sequence that is fixed before the batch is split.

loss = Σ_i weight_i Σ_t loss_it. Because the weights are fixed for the whole batch, the gradient does not depend on micro-batches,
packing order or ranks. Sequences without a trained token get weight 0 and count in no denominator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias, assert_never

Mode: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]


def sequence_weights(
    tokens_N: Sequence[int], prompt_N: Sequence[int], mode: Mode, max_tokens: int
) -> tuple[float, ...]:
    """Weight of each sequence, from its number of trained tokens and the index of its prompt.

    token-mean: 1 / all tokens. seq-mean-token-mean: 1 / (N · own tokens). seq-mean-token-sum: 1 / N.
    seq-mean-token-sum-norm: 1 / (N · max_tokens), a constant (Dr.GRPO, arXiv 2503.20783).
    prompt-mean: token mean within a prompt's samples, then the mean over prompts.
    """
    total, live = sum(tokens_N), sum(n > 0 for n in tokens_N)
    per_prompt: Counter[int] = Counter()
    for tokens, prompt in zip(tokens_N, prompt_N, strict=True):
        per_prompt[prompt] += tokens
    prompts = sum(n > 0 for n in per_prompt.values())

    def weight(tokens: int, prompt: int) -> float:
        if not tokens:
            return 0.0
        match mode:
            case "token-mean":
                return 1 / total
            case "seq-mean-token-mean":
                return 1 / (live * tokens)
            case "seq-mean-token-sum":
                return 1 / live
            case "seq-mean-token-sum-norm":
                return 1 / (live * max_tokens)
            case "prompt-mean":
                return 1 / (prompts * per_prompt[prompt])
            case _:
                assert_never(mode)

    return tuple(weight(tokens, prompt) for tokens, prompt in zip(tokens_N, prompt_N, strict=True))
