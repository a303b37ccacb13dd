"""The learner's GPU kernels against plain arithmetic: flash attention, the head, fused layers, and whole updates."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.algorithms.build import build_objective
from lockstep.config.schema import AdamW, Lora, Recipe
from lockstep.device import allow_repeatable_products, prepare_process
from lockstep.learner import learner
from lockstep.learner.adapters import attach
from lockstep.learner.flash import FLASH, Kernels
from lockstep.learner.layout import Branch, PackedLayout
from lockstep.learner.learner import TorchLearner
from lockstep.learner.optimizer import MasterOptimizer
from lockstep.models import exact
from lockstep.models.attention import AttentionKind
from lockstep.models.fused_layers import FusedLayers
from lockstep.models.heads import Head, _TokenLogprobs, token_logprobs
from lockstep.models.mm import _adder, _rounded, add_product_
from lockstep.types import Batch
from tests.learner.batches import Gradients, make_batch
from tests.learner.models import plain, tokens, twin

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
if torch.cuda.is_available():  # before any test's first product
    allow_repeatable_products(CUDA)
DENSE = Kernels(lambda query: False, FLASH.forward, FLASH.backward)
LAYOUTS: dict[str, tuple[list[Branch], int, bool]] = {
    "shared": ([Branch(256, (511, 300, 64)), Branch(3, (2, 130)), Branch(77, (0, 0))], 0, True),
    "with a root": ([Branch(40, (100, 1, 200)), Branch(129, (300,)), Branch(3, (0,))], 150, True),
    "one response each": ([Branch(50, (300,)), Branch(1, (90,)), Branch(70, (0,))], 0, False),
    "single tokens": ([Branch(1, (1, 1)), Branch(1, (1, 0))], 1, True),
    "only prompts": ([Branch(1, (0,)), Branch(1, ())], 0, True),
}


@pytest.fixture(autouse=True)
def as_in_a_run() -> None:
    prepare_process(CUDA, None)  # sums in fp32


def distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours.double() - theirs).norm() / (theirs.norm() + 1e-9))


# --- attention ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (9, 3, 64), (4, 4, 16), (6, 1, 256)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_flash_is_as_near_to_float64_as_dense_attention(name: str, heads: int, kv_heads: int, size: int):
    branches, root, prompts_first = LAYOUTS[name]
    used = root + sum(branch.tokens for branch in branches)
    total = used + 5  # padding
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(heads, total, size), (kv_heads, total, size), (kv_heads, total, size), (total, heads, size)]
    true = [torch.randn(*s, generator=generator, device=CUDA).bfloat16().double() for s in shapes]
    true[3][used:] = 0
    results = {}
    for kind, kernels, dtype in (
        ("flash", FLASH, torch.bfloat16),
        ("dense", DENSE, torch.bfloat16),
        ("exact", DENSE, torch.float64),
    ):
        query, key, value, mix = (x.to(dtype).requires_grad_() for x in true)
        layout = PackedLayout(branches, CUDA, root, prompts_first=prompts_first, kernels=kernels)
        output = layout.attend(0, query, key, value, AttentionKind(size**-0.5))
        assert output.isfinite().all()
        grads = torch.autograd.grad((output * mix.detach()).sum(), (query, key, value))
        assert all(grad.isfinite().all() for grad in grads)
        results[kind] = (output[:used], *grads)
    for part, (flash, dense, truth) in enumerate(
        zip(results["flash"], results["dense"], results["exact"], strict=True)
    ):
        assert distance(flash, truth) < 1.5 * distance(dense, truth) + 4e-3, (part, distance(flash, truth))


LONG: dict[str, tuple[list[Branch], int, bool]] = {
    **{name: LAYOUTS[name] for name in ("shared", "with a root", "one response each", "single tokens")},
    "long": ([Branch(1200, (700, 620, 20)), Branch(300, (1400, 0))], 100, True),
    "long, packed": ([Branch(900, (700,)), Branch(20, (1480,)), Branch(130, (0,))], 0, False),
}
SPECIAL: dict[str, tuple[int, int, int, int | None, bool]] = {
    "gpt-oss, window": (64, 8, 64, 128, True),
    "gpt-oss, full": (64, 8, 64, None, True),
    "Gemma 3 4B": (8, 4, 256, 512, False),
    "Gemma 3 27B": (32, 16, 128, 1024, False),
    "Mistral": (32, 8, 128, 300, False),
    "Phi-3": (4, 4, 96, 64, False),
    "alone": (4, 2, 64, 1, True),
    "two": (6, 2, 64, 2, True),
}
"""Query heads, key heads, their size, window, sinks."""


def special(name: str, total: int, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], AttentionKind]:
    """Query, key, value [·, T, D], what the output is multiplied with [T, H, D], and sinks [H] of about a softmax's sum."""
    heads, kv_heads, size, window, sinks = SPECIAL[name]
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(heads, total, size), (kv_heads, total, size), (kv_heads, total, size), (total, heads, size)]
    given = [torch.randn(*s, generator=generator, device=CUDA).bfloat16().to(dtype) for s in shapes]
    if sinks:
        given.append((torch.randn(heads, generator=generator, device=CUDA) * 2 + 3).bfloat16().to(dtype))
    return given, AttentionKind(size**-0.5, window)


def special_gradients(layout: PackedLayout, used: int, given: list[Tensor], kind: AttentionKind) -> tuple[Tensor, ...]:
    """Output and gradients of query, key, value and sinks; nothing is read from padding."""
    query, key, value, mix, *sinks = (x.detach().requires_grad_() for x in given)
    mask = (torch.arange(len(mix), device=CUDA) < used)[:, None, None]
    output = layout.attend(0, query, key, value, replace(kind, sinks_H=sinks[0] if sinks else None))
    grads = torch.autograd.grad((output * (mix.detach() * mask)).sum(), (query, key, value, *sinks))
    return output[:used], *grads


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("place", LONG)
def test_windows_and_sinks_by_flash_are_as_near_to_float64_as_dense_attention(place: str, name: str):
    branches, root, prompts_first = LONG[place]
    used = root + sum(branch.tokens for branch in branches)
    results = {}
    for which, kernels, dtype in (
        ("flash", FLASH, torch.bfloat16),
        ("dense", DENSE, torch.bfloat16),
        ("exact", DENSE, torch.float64),
    ):
        given, kind = special(name, used + 5, dtype)
        layout = PackedLayout(branches, CUDA, root, prompts_first=prompts_first, kernels=kernels)
        results[which] = special_gradients(layout, used, given, kind)
        assert bool(layout._parts) == (which == "flash"), "each takes the path that it is called by"
        assert all(tensor.isfinite().all() for tensor in results[which])
        torch.cuda.empty_cache()
    for part, (flash, dense, truth) in enumerate(
        zip(results["flash"], results["dense"], results["exact"], strict=True)
    ):
        assert distance(flash, truth) < 1.5 * distance(dense, truth) + 4e-3, (part, distance(flash, truth))


@pytest.mark.parametrize("name", ["gpt-oss, window", "gpt-oss, full", "Gemma 3 4B"])
def test_windows_and_sinks_give_the_same_bits_where_updates_shall_be_repeatable(name: str):
    branches, root, prompts_first = LONG["long"]
    used = root + sum(branch.tokens for branch in branches)
    given, kind = special(name, used + 5)
    layout = PackedLayout(branches, CUDA, root, prompts_first=prompts_first)
    exact.enable("", on=False, repeatable=True)
    try:
        with exact.repeated():
            first, *others = (special_gradients(layout, used, given, kind) for _ in range(4))
    finally:
        exact.enable("", on=False)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["gpt-oss, window", "gpt-oss, full", "Gemma 3 4B"])
def test_windows_and_sinks_need_no_matrix(name: str):
    """A prompt of 8192 tokens with 8 replies of 1024: a matrix of one query head would have 134 million pairs."""
    given, kind = special(name, 16384)
    layout = PackedLayout([Branch(8192, (1024,) * 8)], CUDA, prompts_first=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    special_gradients(layout, 16384, given, kind)
    taken, query = torch.cuda.max_memory_allocated() - before, given[0].nbytes
    # Copies, output, gradients for each query head, an fp32 sum of the query's: a few times the queries.
    assert taken < 20 * query, taken / query


def test_fp32_has_no_flash_and_is_dense():
    assert FLASH.serves(torch.zeros(2, 4, 64, dtype=torch.bfloat16, device=CUDA))
    assert not FLASH.serves(torch.zeros(2, 4, 64, device=CUDA))
    assert not FLASH.serves(torch.zeros(2, 4, 12, dtype=torch.bfloat16, device=CUDA))


# --- head -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("rows", "vocab", "dtype"), [(9000, 151936, torch.bfloat16), (700, 50257, torch.float32)])
def test_the_head_is_the_plain_formula(rows: int, vocab: int, dtype: torch.dtype, softcap: float | None):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, 256, generator=generator, device=CUDA).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, 256, generator=generator, device=CUDA) * 0.2).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator, device=CUDA)
    mix = torch.linspace(-1, 1, rows, device=CUDA)
    logprobs, entropy = token_logprobs(Head(weight, None, softcap), hidden, targets, 0.9)
    ours = torch.autograd.grad((logprobs * mix).sum() + 0.1 * (entropy * mix.flip(0)).sum(), (hidden, weight))
    wide, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    function: Any = _TokenLogprobs
    exact, exact_entropy = function.apply(wide, wide_weight, None, targets, 0.9, softcap, 1.0)
    loss = (exact * mix).sum() + 0.1 * (exact_entropy * mix.flip(0)).sum()
    theirs = torch.autograd.grad(loss, (wide, wide_weight))
    narrow = dtype == torch.bfloat16
    assert (logprobs - exact).abs().mean() < (1e-2 if narrow else 1e-5)
    # A logit of 10 in bf16 is known to 0.02, and an entropy is a mean over such logits.
    assert (entropy - exact_entropy).abs().mean() < (2e-2 if narrow else 1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a, b) < (1e-2 if narrow else 1e-4)


def test_this_torch_sums_products_in_fp32():
    assert _adder(CUDA, torch.bfloat16) is not _rounded
    total = torch.full((256, 128), 2**-10, device=CUDA)
    ones = (
        torch.ones(256, 512, dtype=torch.bfloat16, device=CUDA),
        torch.ones(512, 128, dtype=torch.bfloat16, device=CUDA),
    )
    add_product_(total, *ones)
    assert (total == 512 + 2**-10).all()


# --- whole updates --------------------------------------------------------------------------------------------------
def recipe(recompute: str = "none", **more: Any) -> Recipe:
    update = {"recompute": recompute} | more
    algorithm = {"kind": "grpo", "kl": {"coef": 0.3}, "entropy_coef": 0.2}
    return Recipe.model_validate({"algorithm": algorithm, "update": update, "optimizer": {"kind": "adamw", "lr": 0.0}})


LOSS = build_objective(recipe()).loss


def long_batch() -> Batch:
    """Groups with long prompts: several tiles of every kernel."""
    batch = make_batch(0.9)
    longer = tuple(replace(s, prompt_ids=(*tokens(300, s.group), *s.prompt_ids)) for s in batch.sequences)
    return replace(batch, sequences=longer)


def with_adapters(model: Any) -> nn.Module:
    """Adapters that do something: both factors are random, the same on every device."""
    adapted = attach(model, Lora(rank=4), seed=0)
    for number, parameter in enumerate(p for p in adapted.parameters() if p.requires_grad):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1
        parameter.data.copy_(values.bfloat16())
    return adapted


def gradients(model: nn.Module, given: Recipe, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    learner = TorchLearner(model, given)
    with Gradients(model) as found:
        metrics = learner.update(batch, LOSS)
    return metrics, found.of


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt-oss"])
def test_gradients_are_those_of_the_cpu(family: str, lora: bool, monkeypatch: pytest.MonkeyPatch):
    """bf16 kernels against fp32 on a CPU, and as near to it as the same model in bf16 by plain layers."""

    def build(dtype: torch.dtype, device: str) -> nn.Module:
        model: Any = twin(plain(family, dtype=torch.bfloat16)).to(dtype).to(device)
        return with_adapters(model) if lora else model

    batch = long_batch()
    if family in ("mistral", "gemma2", "gemma3", "gpt-oss"):  # windows of 8: nothing is gained by length
        batch = make_batch(0.9)
    truth_metrics, truth = gradients(build(torch.float32, "cpu"), recipe(), batch)
    metrics, gpu = gradients(build(torch.bfloat16, "cuda"), recipe(), batch)
    monkeypatch.setattr(learner, "fuse_layers", lambda model: FusedLayers(reason="compared with plain layers"))
    _, plainly = gradients(build(torch.bfloat16, "cuda"), recipe(), batch)
    assert metrics["loss/policy"] == pytest.approx(truth_metrics["loss/policy"], rel=0.05, abs=0.05)
    assert metrics["entropy/mean"] == pytest.approx(truth_metrics["entropy/mean"], rel=0.02)
    ours = [float((gpu[n].cpu() - g).norm() / g.norm()) for n, g in truth.items() if g.norm() > 0]
    theirs = [float((plainly[n].cpu() - g).norm() / g.norm()) for n, g in truth.items() if g.norm() > 0]
    # A router near a tie sends a token to another expert for one rounded digit.
    allowed = 2.5 if family == "gpt-oss" else 1.5
    assert sum(ours) < allowed * sum(theirs) + 0.01 * len(ours), (sum(ours) / len(ours), sum(theirs) / len(theirs))


@pytest.mark.parametrize("lora", [False, True])
def test_recomputing_changes_nothing_beyond_the_order_of_sums(lora: bool):
    results = {}
    for mode in ("none", "selective", "full"):
        model: Any = twin(plain("qwen3", dtype=torch.bfloat16)).to("cuda")
        model = with_adapters(model) if lora else model
        results[mode] = gradients(model, recipe(mode), long_batch())[1]
    for mode in ("selective", "full"):
        for name, grad in results["none"].items():
            assert distance(results[mode][name], grad) < 2e-2, (mode, name)


def test_the_log_says_what_is_fused():
    learner = TorchLearner(twin(plain("qwen3", dtype=torch.bfloat16)).to("cuda"), Recipe())
    assert learner.notes[0] == "fused layers: 9 norms, 2 gated activations, rotary embeddings of 2 attention layers"
    assert learner.notes[1] == "16384 tokens per micro-batch, recompute selective"


def test_memory_that_runs_out_costs_a_split_and_changes_nothing():
    """For real: the process is given too little for the whole micro-batch and enough for its halves."""
    base = make_batch(1.0, old=False, ref=False, masked=False)
    sequences = tuple(
        replace(
            base.sequences[0],
            prompt_ids=tokens(2000, group),
            ids=tokens(6000, 50 + group),
            trained=(True,) * 6000,
            rollout_logprobs=(-5.0,) * 6000,
            advantages=(0.5,) * 6000,
            group=group,
        )
        for group in range(4)
    )
    batch = Batch(sequences)
    given = Recipe.model_validate({"optimizer": {"kind": "adamw", "lr": 0.0}, "update": {"recompute": "none"}})
    loss = build_objective(given).loss

    def run(budget: int, limit: int | None) -> tuple[dict[str, float], dict[str, Tensor], int]:
        model = twin(plain("qwen2", dtype=torch.bfloat16)).to("cuda")
        learner = TorchLearner(
            model,
            given.model_copy(update={"update": given.update.model_copy(update={"tokens_per_microbatch": budget})}),
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.mem_get_info()[1]
        try:
            if limit is not None:
                torch.cuda.set_per_process_memory_fraction(limit / total)
            with Gradients(model) as found:
                metrics = learner.update(batch, loss)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return metrics, found.of, torch.cuda.max_memory_reserved()

    run(100_000, None)  # compiles
    _, expected, whole = run(100_000, None)
    _, _, half = run(16_000, None)
    if whole < 1.3 * half:
        pytest.skip(f"the halves take {half} bytes and the whole {whole}: nothing lies between")
    metrics, found, _ = run(100_000, (whole + half) // 2)
    assert metrics["batch/oom_splits"] == 1
    assert metrics["batch/microbatches"] == 2
    for name, grad in expected.items():
        assert distance(found[name], grad) < 3e-2, name


def test_eight_bit_moments_step_as_on_a_cpu():
    results = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        given = {"w": nn.Parameter(torch.randn(300, 70, generator=generator).to(device))}
        optimizer = MasterOptimizer(given, AdamW(states="8bit"))
        for step in range(5):
            ((given["w"] - step) ** 2).sum().backward()
            optimizer.step(0.01)
        results.append((given["w"].detach().cpu(), {n: t.cpu() for n, t in optimizer.tensors().items()}))
    (weight, state), (other, theirs) = results
    torch.testing.assert_close(weight, other, rtol=1e-3, atol=1e-3)
    assert state.keys() == theirs.keys()
    differing = (state["exp_avg.w"] != theirs["exp_avg.w"]).double().mean()
    assert differing < 1e-2, "a border between two codes may fall either way"
    resumed = MasterOptimizer({"w": nn.Parameter(other.cuda())}, AdamW(states="8bit"))
    resumed.restore(theirs)
    assert copy.copy(resumed.tensors())["step.w"].device.type == "cpu"
