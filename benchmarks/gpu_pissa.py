"""What a PiSSA start costs over plain LoRA's on one GPU, and how exact it is: Qwen3-4B's shape with random weights.

    python benchmarks/gpu_pissa.py --out pissa.txt           # about a minute on an H200
    python benchmarks/gpu_pissa.py --shape tiny --device cpu # does the script run?

Random weights have the flattest spectrum there is, which is the hardest case for finding singular values; `--decay` gives the
matrices a spectrum like a trained model's. Every start begins from the same model. Compared are the largest singular values
of sampled layers (full decomposition in fp64), and the log-probabilities of the model before and after, beside what bf16 itself
does to them (the same model in fp32).
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import Lora
from lockstep.learner.adapter_files import Base
from lockstep.learner.adapter_start import lora_layers, start_of
from lockstep.learner.adapters import attach, facts_of
from lockstep.learner.learner import plain_logprobs
from lockstep.learner.top_singular import exact_values
from lockstep.models.attention import NAME

SHAPES = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Qwen3's."""


def model_of(shape: str, device: str, dtype: torch.dtype, decay: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny = shape == "tiny"
    config = Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=2 if tiny else 8,
        head_dim=64 if tiny else 128,
        vocab_size=1024 if tiny else 151936,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM._from_config(config, attn_implementation=NAME)
    finally:
        torch.set_default_dtype(torch.float32)
    if decay:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "_proj" in name:  # columns of falling length: a spectrum that falls by a power
                    fall = torch.arange(1, weight.shape[1] + 1, device=device).float() ** -0.4
                    weight.mul_((fall / fall.square().mean().sqrt()).to(weight.dtype))
    return model.eval()


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    synchronise(device)
    begin = time.perf_counter()
    result = call()
    synchronise(device)
    return result, time.perf_counter() - begin


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def logprobs(model: Any, device: str) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(3, vocabulary, (256,), generator=generator).tolist()) for _ in range(4)]
    return torch.tensor([x for row in plain_logprobs(model, rows, 2048) for x in row])


def worst_value(model: Any, original: dict[str, torch.Tensor], layers: int) -> tuple[float, list[str]]:
    """Largest relative error of a singular value over evenly chosen layers of every shape."""
    chosen = sorted(lora_layers(model).items(), key=lambda item: (tuple(original[item[0]].shape), item[0]))
    chosen = chosen[:: max(1, len(chosen) // layers)]
    worst, names = 0.0, []
    for name, layer in chosen:
        start = start_of(layer)
        assert start is not None
        down_RI, up_OR = (factor.double() for factor in start)
        found_R = (
            torch.linalg.vector_norm(up_OR, dim=0) * torch.linalg.vector_norm(down_RI, dim=1) * layer.scaling["default"]
        )
        exact_R = exact_values(original[name], len(found_R)).to(found_R.device)
        worst = max(worst, float(((found_R.sort(descending=True).values - exact_R).abs() / exact_R).max()))
        names.append(name)
    return worst, names


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    device, dtype = arguments.device, torch.bfloat16
    build = lambda kind=dtype: model_of(arguments.shape, device, kind, arguments.decay)  # noqa: E731
    model = build()
    base, seconds = timed(lambda: Base.of(model, arguments.shape), device)
    say(f"fingerprint of the base: {seconds:.2f} s")
    before = logprobs(model, device)
    noise = (logprobs(build(torch.float32), device) - before).abs() if arguments.shape != "tiny" else torch.zeros(1)
    original = {n.removesuffix(".weight"): p.detach().clone() for n, p in model.named_parameters() if "_proj" in n}
    plain = Lora(rank=arguments.rank, alpha=2.0 * arguments.rank)
    _, warm = timed(lambda: attach(build(), plain, 0, base), device)
    fresh = build()
    _, of_lora = timed(lambda: attach(fresh, plain, 0, base), device)
    say(f"plain LoRA: {of_lora:.2f} s (in a fresh process, with the model's creation: {warm:.2f} s)")
    pissa = plain.model_copy(update={"init": "pissa"})
    results = []
    for label in ("PiSSA, computed", "PiSSA, from the cache"):
        fresh = build()
        started, seconds = timed(lambda fresh=fresh: attach(fresh, pissa, 0, base), device)  # type: ignore[misc]
        facts = facts_of(started)
        assert facts is not None
        results.append(seconds - of_lora)
        say(f"{label}: {seconds:.2f} s, {seconds - of_lora:+.2f} s over plain LoRA; {facts.notes[-1]}")
    change = (logprobs(started, device) - before).abs()
    say(
        f"log-probabilities at the start against the base: mean {change.mean():.2e}, max {change.max():.2e}; "
        f"bf16 against fp32 of the base: mean {noise.mean():.2e}, max {noise.max():.2e}"
    )
    worst, names = worst_value(started, original, arguments.layers)
    say(f"singular values of {len(names)} layers: largest relative error {worst:.2e} (bf16 factors included)")
    ok = results[0] <= 5 and worst <= 0.01 and (arguments.shape == "tiny" or change.mean() <= 2 * noise.mean())
    say(
        f"at most 5 s over LoRA, 1 % on singular values, start equal to the base within bf16 noise: {'yes' if ok else 'NO'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12, help="layers whose singular values are checked")
    parser.add_argument("--decay", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU"
    say(f"{name}, torch {torch.__version__}; Qwen3 {arguments.shape}, rank {arguments.rank}, decay {arguments.decay}")
    with tempfile.TemporaryDirectory() as cache:
        import os

        os.environ["LOCKSTEP_CACHE"] = cache
        run(arguments, say)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
