"""Experts by grouped products, by Triton's interpreter: values and gradients are those of transformers' loop over experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.models.known import kind_of_experts
from lockstep.models.mxfp4 import Packed
from lockstep.models.mxfp4_experts import Mxfp4Experts
from tests.interpreter import interpreted
from tests.learner.models import plain
from tests.models.mxfp4_files import random_blocks

pytest.importorskip("triton")


def part(family: str, name: str) -> Any:
    model = plain(family, seed=3)
    return next(m for m in model.modules() if type(m).__name__.endswith(name))


def asked(module: Any, tokens: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).requires_grad_()
    count = module.num_experts
    index = torch.stack([torch.randperm(count, generator=generator)[:top] for _ in range(tokens)])
    weight = torch.rand(tokens, top, generator=generator).requires_grad_()
    return x, index, weight


def close(ours: Tensor, theirs: Tensor, what: str, within: float = 2e-6) -> None:
    assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < within, what


def values_and_gradients(family: str) -> None:
    from lockstep.models.experts import fuse_experts

    module = part(family, "Experts")
    for tokens, top in ((1, 2), (41, 2)):
        x, index, weight = asked(module, tokens, top)
        inputs = [x, weight, *module.parameters()]
        theirs = type(module).forward(module, x, index, weight)
        mix = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
        wanted = torch.autograd.grad((theirs * mix).sum(), inputs)
        assert fuse_experts(module)
        ours = module(x, index, weight)
        close(ours, theirs, "in training")
        for a, b in zip(torch.autograd.grad((ours * mix).sum(), inputs), wanted, strict=True):
            close(a, b, "gradient")
        with torch.no_grad():
            assert torch.equal(module(x, index, weight), ours), "in decoding"
        del module.forward


def clamped() -> None:
    """Gates and ups of gpt-oss beyond its limit give no gradient there."""
    from lockstep.models.experts import fuse_experts

    module = part("gpt-oss", "Experts")
    x, index, weight = asked(module, 12, 2)
    large = (300 * x).detach().requires_grad_()
    theirs = type(module).forward(module, large, index, weight)
    wanted = torch.autograd.grad(theirs.square().sum(), [large, weight])
    fuse_experts(module)
    ours = module(large, index, weight)
    close(ours, theirs, "values")
    for a, b in zip(torch.autograd.grad(ours.square().sum(), [large, weight]), wanted, strict=True):
        close(a, b, "gradient", 2e-5)  # large numbers cancel


def only_what_is_reached() -> None:
    """Experts that no token reaches hold NaN: they are not read, nor is anything of them written."""
    from lockstep.models.experts import fuse_experts
    from lockstep.models.route_kernels import sort_rows

    module = part("qwen3-moe", "Experts")
    x, index, weight = asked(module, 20, 2)
    index = torch.where(index == 3, (index.flip(1) + 1) % 3, index) % 3  # experts 0 to 2
    index[:, 1] = (index[:, 0] + 1) % 3
    with torch.no_grad():
        expected = type(module).forward(module, x, index, weight)
        module.gate_up_proj[3] = torch.nan
        module.down_proj[3] = torch.nan
        fuse_experts(module)
        close(module(x, index, weight), expected, "with an expert of NaN")
    rows = sort_rows(index, 4)
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    assert rows.order_R.tolist() == order.tolist()
    assert rows.place_R[order].tolist() == list(range(40))
    assert rows.expert_R.tolist() == flat[order].tolist()
    assert rows.bounds_E.tolist() == [0, *flat.bincount(minlength=4).cumsum(0).tolist()]


def uneven(each: str, boxed: str = "") -> None:
    """Experts with no rows, one, and as many as several blocks, for the tile of this many rows on average.

    `boxed`: the weights come by the copy engine.
    """
    from lockstep.models import expert_kernels
    from lockstep.models.activation_kernels import Activation
    from lockstep.models.route_kernels import sort_rows

    fixed = {
        "gate_up_tile": expert_kernels.gate_up_tile(int(each)),
        "product_tile": expert_kernels.product_tile(int(each)),
    }
    for name, tile in fixed.items():
        setattr(expert_kernels, name, lambda _, tile=tile: tile)
        assert not boxed or tile.side
    dtype = torch.float16 if boxed else torch.float32
    expert_kernels.since_hopper = lambda: bool(boxed)
    generator = torch.Generator().manual_seed(1)
    size = fixed["gate_up_tile"].rows
    counts = [0, 1, 3 * size + 5, 0, size // 2 + 6, size, 2, size // 2]
    experts = torch.arange(8).repeat_interleave(torch.tensor(counts))
    index = experts[torch.randperm(len(experts), generator=generator)][:, None]
    width = 128 if each == "20" else 24  # whole tiles, or parts of one
    x = torch.randn(len(index), width, generator=generator).to(dtype)
    both, down = (torch.randn(8, outputs, width, generator=generator).to(dtype) / 4 for outputs in (2 * width, width))
    assert all((expert_kernels._boxes(one, fixed["product_tile"]) is not None) == bool(boxed) for one in (both, down))
    rows = sort_rows(index, 8)
    inner = expert_kernels.gate_up(x, both, None, rows, Activation())
    found = expert_kernels.product(inner, down, rows)
    gates, ups = torch.einsum("tx,tox->to", x.double(), both.double()[index[:, 0]]).chunk(2, 1)
    wanted = torch.einsum("ti,toi->to", nn.functional.silu(gates) * ups, down.double()[index[:, 0]])
    close(found[rows.place_R.long()].double(), wanted, f"tile for {each} rows", 2e-3 if boxed else 2e-6)


def routers(family: str) -> None:
    """Choices, weights and gradients of a router."""
    from lockstep.models.experts import fuse_experts

    module = part(family, "TopKRouter")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    for shared in (True, False) if hasattr(module, "norm_topk_prob") else (True,):
        module.norm_topk_prob = shared
        x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        inputs = [x, *module.parameters()]
        logits, weight, index = type(module).forward(module, x)
        mix = torch.linspace(-1, 1, weight.numel()).view_as(weight)
        wanted = torch.autograd.grad((weight * mix).sum(), inputs)
        fuse_experts(module)
        ours = module(x)
        assert ours[2].tolist() == index.tolist()
        close(ours[0], logits, "logits")
        close(ours[1], weight, "weights")
        for a, b in zip(torch.autograd.grad((ours[1] * mix).sum(), inputs), wanted, strict=True):
            assert float((a - b).norm()) < 2e-5 * float(b.norm()) + 1e-6
        del module.forward


def routed_in_parts(family: str) -> None:
    """A router's product in parts: the choices of the whole product, and the same for a token among others."""
    from lockstep.models import route_kernels
    from lockstep.models.experts import Router

    route_kernels.PART = 256  # two parts, the second of them shorter
    router = Router.of(part(family, "TopKRouter"))
    assert router is not None
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(count, 400, generator=generator) for count in (70, len(router.weight_EH)))
    bias = None if router.bias_E is None else torch.randn(len(weight), generator=generator)
    options = {"shared": router.shared, "dtype": torch.float32}
    logits, *chosen = route_kernels.route(x, weight, bias, router.top, **options)
    close(logits, nn.functional.linear(x, weight, bias), "logits", 1e-3)  # a GPU's products round to tf32
    whole = route_kernels.choose(logits, router.top, **options)
    assert all(map(torch.equal, chosen, whole))
    for count in (1, 17):
        few = route_kernels.route(x[:count], weight, bias, router.top, **options)
        assert all(torch.equal(a, b[:count]) for a, b in zip(few, (logits, *chosen), strict=True))


def summed_and_normed(family: str) -> None:
    """The sum over experts with the residual and the norm: what the sum and the norm give one after the other."""
    from lockstep.models.experts import before_the_sum, fuse_experts
    from lockstep.models.norm_kernels import row_norm

    mixture = part(family, "MLP" if family == "gpt-oss" else "SparseMoeBlock")
    x, residual = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(4))
    assert before_the_sum(mixture, x) is None, "the model's own loop"
    for module in mixture.modules():
        fuse_experts(module)
    with torch.no_grad():
        found = before_the_sum(mixture, x)
        assert found is not None
        whole = mixture(x[None])
        assert torch.equal(found.summed(), (whole[0] if isinstance(whole, tuple) else whole)[0])
        weight = torch.linspace(0.5, 2, 64)
        for late in (False, True):
            total, out, wanted_total = (torch.empty_like(x) for _ in range(3))
            wanted = torch.empty(9, 70)[:, :64]
            found.add_norm(residual, weight, 1e-5, total, out, late=late)
            row_norm(found.summed(), residual, weight, 1e-5, wanted_total, wanted, late=late)
            assert torch.equal(total, wanted_total)
            assert torch.equal(out, wanted)


def equal_logits() -> None:
    """The first of equal experts is chosen; a logit that is no number leaves every choice within bounds."""
    from lockstep.models.route_kernels import choose

    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [torch.nan] * 5])
    weight, index = choose(logits, 2, shared=True, dtype=torch.float32)
    assert index.tolist()[0] == [1, 2]
    assert weight.tolist()[0] == [0.5, 0.5]
    assert all(0 <= one < 5 for one in index.tolist()[1])


def in_four_bits() -> None:
    """Experts that stay in MXFP4 by kernels: values and gradients are those of the loop, in training and in decoding."""
    from lockstep.models.experts import fuse_experts
    from lockstep.models.mxfp4_kernels import opened

    dense = part("gpt-oss", "Experts")
    packed = [Packed.of(*random_blocks(tuple(one.shape))) for one in (dense.gate_up_proj, dense.down_proj)]
    for one in packed:
        assert torch.equal(opened(one, torch.float32), one.dense(torch.float32).transpose(1, 2))
    module = Mxfp4Experts(dense, *packed)
    for tokens in (1, 41):
        x, index, weight = asked(module, tokens, 2)
        inputs = [x, weight, module.gate_up_proj_bias, module.down_proj_bias]
        theirs = type(module).forward(module, x, index, weight)
        mix = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
        wanted = torch.autograd.grad((theirs * mix).sum(), inputs)
        assert fuse_experts(module)
        ours = module(x, index, weight)
        close(ours, theirs, "in training")
        for a, b in zip(torch.autograd.grad((ours * mix).sum(), inputs), wanted, strict=True):
            close(a, b, "gradient")
        with torch.no_grad():
            close(module(x, index, weight), theirs, "in decoding")
        del module.forward


def adapted(family: str, packed: str = "") -> None:
    """Values and gradients of experts with adapters are those of the loop; decoding of dense experts has the bits of training."""
    from lockstep.learner.lora_experts import attach_to_experts
    from lockstep.models.experts import fuse_experts
    from lockstep.numerics.experts import mix as loop

    model = plain(family, seed=3)
    module = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
    if packed:
        matrices = [Packed.of(*random_blocks(tuple(one.shape))) for one in (module.gate_up_proj, module.down_proj)]
        module = Mxfp4Experts(module, *matrices)
    holder = nn.ModuleDict({"experts": module})
    attach_to_experts(nn.ModuleDict({"mlp": holder}), "default", 4, 0.75)
    own = [(n, p) for n, p in module.named_parameters() if p.is_floating_point()]
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in own:
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    del module.forward
    assert fuse_experts(module)
    for tokens, top in ((1, 2), (41, 2)):
        x, index, weight = asked(module, tokens, top)
        inputs = [x, weight, *(p for _, p in own)]
        theirs = loop(module, None, (None, None), x, index, weight)
        mix = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
        wanted = torch.autograd.grad((theirs * mix).sum(), inputs)
        ours = module(x, index, weight)
        close(ours, theirs, "in training")
        for (name, _), a, b in zip(
            [("x", x), ("weight", x), *own], torch.autograd.grad((ours * mix).sum(), inputs), wanted, strict=True
        ):
            close(a, b, f"gradient of {name}")
        with torch.no_grad():
            found = module(x, index, weight)
            close(found, ours, "in decoding")
            assert packed or torch.equal(found, ours), "bits of decoding"


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("qwen3_moe", "Qwen3Moe", "gated"), ("mixtral", "Mixtral", "gated"), ("olmoe", "Olmoe", "gated"),
        ("gpt_oss", "GptOss", "paired"), ("deepseek_v4", "DeepseekV4", None), ("llama4", "Llama4Text", None),
    ],
)  # fmt: skip
def test_experts_are_known_by_their_code_and_activation(family: str, name: str, kind: str | None):
    """The shapes of DeepSeek V4's are those of Qwen3-MoE's, but its gates are clamped."""
    layer = getattr(pytest.importorskip(f"transformers.models.{family}.modeling_{family}"), f"{name}Experts")
    module: Any = layer.__new__(layer)
    nn.Module.__init__(module)
    module.gate_up_proj, module.down_proj = (nn.Parameter(torch.empty(4, *size)) for size in ((8, 6), (6, 4)))
    module.act_fn = nn.SiLU()
    assert kind_of_experts(module) == kind
    if kind == "gated":
        module.act_fn = nn.GELU()
        assert kind_of_experts(module) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_values_and_gradients_are_those_of_the_loop(family: str) -> None:
    interpreted(values_and_gradients, family)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "packed"), [("qwen3-moe", ""), ("gpt-oss", ""), ("gpt-oss", "packed")])
def test_adapters_on_experts_are_those_of_the_loop(family: str, packed: str) -> None:
    interpreted(adapted, family, packed)


@pytest.mark.slow
def test_gradients_stop_at_the_limit() -> None:
    interpreted(clamped)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_a_router_chooses_as_transformers_does(family: str) -> None:
    interpreted(routers, family)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_a_router_may_add_up_parts(family: str) -> None:
    interpreted(routed_in_parts, family)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_the_sum_over_experts_may_be_left_to_the_norm(family: str) -> None:
    interpreted(summed_and_normed, family)


def test_experts_that_nothing_reaches_are_not_read() -> None:
    interpreted(only_what_is_reached)


@pytest.mark.parametrize("each", ["4", "20", "30", "100", pytest.param("400", marks=pytest.mark.slow)])
def test_experts_may_have_any_number_of_rows(each: str) -> None:
    interpreted(uneven, each)


def test_the_copy_engine_may_read_weights() -> None:
    interpreted(uneven, "30", "boxed")


def test_the_first_of_equal_experts_is_chosen() -> None:
    interpreted(equal_logits)


@pytest.mark.slow
def test_experts_in_four_bits_are_those_of_the_loop() -> None:
    interpreted(in_four_bits)
