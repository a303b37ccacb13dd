"""Attention over a packed stream on one GPU, forward and gradients: our kernels, FlashAttention's, and these in a fixed order.

    python benchmarks/gpu_attention.py --write     # table into benchmarks/results/gpu_attention.txt

One layer of the Qwen2.5-1.5B shape (12 heads of 128, 2 of keys), groups of 8 with a shared prompt of 128 tokens, as many groups
as fit into a micro-batch of 14,336 tokens; replies of 512 tokens, or of log-normal lengths. The floor is the time of the five
products of the gradients for each pair of a query and a key that it sees, at the rated FLOP/s of an H200. Our forward pass is
that of numerics.exact; without it FlashAttention's runs.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from devices import device_name
from gpu_rollout import lengths_of
from results_file import RESULTS, header, write_section

from lockstep.learner.flash import FLASH
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.models import exact
from lockstep.models.attention import AttentionKind
from lockstep.plan.floors import H200

HEADS, KV_HEADS, SIZE, PROMPT, TOKENS = 12, 2, 128, 128, 14336
ARMS = {"FlashAttention": (False, False), "FlashAttention, fixed order": (True, False), "ours": (False, True)}
"""By name: torch's deterministic algorithms, and our kernels."""


def branches_of(work: str) -> list[Branch]:
    found: list[Branch] = []
    for lengths in lengths_of(work):
        branch = Branch(PROMPT, tuple(length - 1 for length in lengths))
        if sum(one.tokens for one in found) + branch.tokens > TOKENS:
            break
        found.append(branch)
    return found


def pairs_of(branches: list[Branch]) -> int:
    """Pairs of a query and a key that it sees."""
    prompts = sum(one.prompt * (one.prompt + 1) // 2 for one in branches)
    return prompts + sum(n * one.prompt + n * (n + 1) // 2 for one in branches for n in one.responses)


def lines_of(work: str) -> list[str]:
    branches = branches_of(work)
    tokens = sum(branch.tokens for branch in branches)
    torch.manual_seed(0)
    streams = [
        torch.randn(heads, tokens, SIZE, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    grad = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    floor = 5 * 2 * SIZE * HEADS * pairs_of(branches) / H200.flops
    lines = []
    for name, (fixed, own) in ARMS.items():
        kernels = FLASH if own else replace(FLASH, ordered=lambda query: False)
        layout = PackedLayout(branches, torch.device("cuda"), prompts_first=True, kernels=kernels)
        out = layout.attend(0, *streams, AttentionKind(SIZE**-0.5))

        def gradients(out: torch.Tensor = out) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, streams, grad, retain_graph=True)

        torch.use_deterministic_algorithms(fixed)
        first, again = gradients(), gradients()
        took = triton.testing.do_bench(gradients, warmup=50, rep=300, return_mode="median") / 1e3
        torch.use_deterministic_algorithms(False)
        with torch.no_grad(), exact.on_trial() if own else nullcontext():
            forward = triton.testing.do_bench(
                lambda layout=layout: layout.attend(0, *streams, AttentionKind(SIZE**-0.5)), warmup=50, rep=300
            )
        same = "yes" if all(map(torch.equal, first, again)) else "no"
        lines.append(
            f"| {work} | {tokens:,} | {name} | {forward * 1e3:.0f} | {took * 1e6:.0f} | {floor / took:.0%} | {same} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs="?", type=Path, const=RESULTS / "gpu_attention.txt", help="write the table")
    args = parser.parse_args()
    head = "| replies | tokens | kernels | forward, us | gradients, us | share of their floor | repeated in the same bits |"
    lines = [*header(__file__, device_name(), ("torch", "triton")), "", head, "| --- " * 7 + "|"]
    lines += [line for work in ("fixed", "lognormal") for line in lines_of(work)]
    print("\n".join(lines), flush=True)
    if args.write:
        write_section(args.write, "attention", lines)


if __name__ == "__main__":
    main()
