"""The fused passes of a LoRA layer against autograd of its formula, its weights dense and with the up matrix beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.learner import lora_linear
from lockstep.learner.lora_linear import LoraLinear, WideLora, _FusedLora, beside
from lockstep.models import exact
from lockstep.rollout.paged.joined import side_by_side as lay
from tests.learner.models import plain, twin
from tests.learner.test_numerics import with_adapter
from tests.rollout.paged.test_engine import paged_over

TOKENS, INPUTS, OUTPUTS, RANK, SCALING = 7, 12, 20, 3, 1.7
DOUBLE = torch.float64


def side_by_side(gap: int, between: float = 9.0, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    """A weight and an up matrix in the rows of one tensor, and between them what is neither's."""
    generator = torch.Generator().manual_seed(gap)
    whole = torch.randn(outputs, INPUTS + gap + RANK + 2, generator=generator, dtype=DOUBLE)
    whole[:, INPUTS : INPUTS + gap] = between
    return whole[:, :INPUTS], whole[:, INPUTS + gap : INPUTS + gap + RANK].requires_grad_()


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the down matrix, a bias, and what multiplies the result."""
    generator = torch.Generator().manual_seed(1)
    shapes = (TOKENS, INPUTS), (RANK, INPUTS), (OUTPUTS,), (TOKENS, OUTPUTS)
    x, down, bias, mix = (torch.randn(*shape, generator=generator, dtype=DOUBLE) for shape in shapes)
    return x.requires_grad_(), down.requires_grad_(), bias, mix


def apply_wide(
    x: Tensor, wide: Tensor | None, bias: Tensor | None, *adapters: Tensor, ranks: tuple[int, ...] = (RANK,), free: int = 0
) -> Any:  # fmt: skip
    """The wide pass: `adapters` are all down and then all up matrices; returns one output, or a tuple of several."""
    assert wide is not None
    downs, ups = adapters[: len(ranks)], adapters[len(ranks) :]
    sizes = tuple(up.shape[0] for up in ups)
    found: Any = WideLora.apply(x, free, wide, bias, torch.cat(downs).detach(), SCALING, sizes, ranks, *adapters)  # type: ignore[no-untyped-call]
    return found[0] if len(found) == 1 else found


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", ["wide", "dense"])
def test_output_and_gradients_are_those_of_the_formula(kind: str, biased: bool, gap: int):
    weight, up = side_by_side(gap)
    x, down, bias, mix = inputs()
    used = bias if biased else None
    expected = x @ weight.T + SCALING * (x @ down.T) @ up.T + (bias if biased else 0)
    if kind == "wide":
        wide = beside([weight], [up])
        assert wide is not None
        found: Any = apply_wide(x, wide, used, down, up)
    else:
        found = _FusedLora.apply(x, x, weight, used, down, up, SCALING)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (x, down, up), mix)
    for gradient, right in zip(torch.autograd.grad(found, (x, down, up), mix), wanted, strict=True):
        torch.testing.assert_close(gradient, right)


def into(out: Tensor, x: Tensor, down: Tensor, scaling: float) -> None:
    """exact.adapter_into, which needs a GPU."""
    out.copy_(scaling * (x @ down.T))


def test_an_adapters_product_goes_into_free_columns_behind_the_input(monkeypatch: pytest.MonkeyPatch):
    for name, stand_in in (("enabled", lambda: True), ("adapter_into", into), ("linear", torch.nn.functional.linear)):
        monkeypatch.setattr(exact, name, stand_in)  # the real ones need a GPU
    monkeypatch.setattr(exact._state, "room", 0)
    weight, up = side_by_side(0)
    x, down, bias, mix = inputs()
    behind = torch.full((TOKENS, INPUTS + exact.ALIGNED), torch.nan, dtype=DOUBLE)
    roomy = behind[:, :INPUTS]
    roomy.copy_(x.detach())
    roomy.requires_grad_()
    results = []
    for one, free in ((x, 0), (roomy, RANK - 1), (roomy, RANK)):
        found: Any = apply_wide(one, beside([weight], [up]), bias, down, up, free=free)
        results.append((found, *torch.autograd.grad(found, (one, down, up), mix)))
        assert behind[:, INPUTS:].isnan().all() == (free < RANK)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert torch.equal(roomy, x)
    assert exact._state.room == exact.ALIGNED  # asked for when there was none


def test_free_columns_serve_one_layer(monkeypatch: pytest.MonkeyPatch):
    """A second layer that reads the same input must not overwrite what the first one's backward pass reads."""
    for name, stand_in in (("enabled", lambda: True), ("adapter_into", into), ("linear", torch.nn.functional.linear)):
        monkeypatch.setattr(exact, name, stand_in)
    x, *_ = inputs()
    outputs, expected, adapters = [], [], []
    roomy = torch.zeros(TOKENS, INPUTS + RANK, dtype=DOUBLE)[:, :INPUTS]
    roomy.copy_(x.detach())
    roomy.free_columns = RANK  # type: ignore[attr-defined]
    for _ in range(2):
        weight, up = side_by_side(0)
        down = torch.randn(RANK, INPUTS, dtype=DOUBLE, requires_grad=True)
        base = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        base.weight = torch.nn.Parameter(weight, requires_grad=False)
        found = lora_linear._wide([lora_linear._Parts(base, down, up, SCALING)], roomy)
        assert found is not None
        outputs.append(found[0])
        expected.append(x @ weight.T + SCALING * (x @ down.T) @ up.T)
        adapters += [down, up]
    mine = torch.autograd.grad(sum(one.sum() for one in outputs), adapters)  # type: ignore[arg-type]
    right = torch.autograd.grad(sum(one.sum() for one in expected), adapters)  # type: ignore[arg-type]
    for gradient, wanted in zip(mine, right, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("gap", [0, 3])
def test_a_layer_with_fewer_outputs_than_inputs(gap: int):
    weight, up = side_by_side(gap, outputs=5)
    x, down, _, mix = inputs()
    wide = beside([weight], [up])
    found: Any = apply_wide(x, wide, None, down, up)  # type: ignore[no-untyped-call]
    expected = x @ weight.T + SCALING * (x @ down.T) @ up.T
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (x, down, up), mix[:, :5])
    for gradient, right in zip(torch.autograd.grad(found, (x, down, up), mix[:, :5]), wanted, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("outputs", [OUTPUTS, 5])
def test_an_input_that_needs_no_gradient_gets_none(outputs: int):
    weight, up = side_by_side(0, outputs=outputs)
    x, down, _, mix = inputs()
    mix = mix[:, :outputs]
    wide = beside([weight], [up])
    found: Any = apply_wide(x.detach(), wide, None, down, up)  # type: ignore[no-untyped-call]
    wanted = torch.autograd.grad(x @ weight.T + SCALING * (x @ down.T) @ up.T, (down, up), mix)
    for gradient, right in zip(torch.autograd.grad(found, (down, up), mix), wanted, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("outputs", [(20, 6, 6), (4, 3)])
def test_layers_with_one_input_are_one_product(outputs: tuple[int, ...], biased: bool):
    model = nn.ModuleList([nn.Linear(INPUTS, o, bias=biased, dtype=DOUBLE) for o in outputs])
    ranks = tuple(range(2, 2 + len(outputs)))
    generator = torch.Generator().manual_seed(7)
    downs = [nn.Parameter(torch.randn(r, INPUTS, generator=generator, dtype=DOUBLE)) for r in ranks]
    ups = [
        nn.Parameter(torch.randn(o, r, generator=generator, dtype=DOUBLE)) for o, r in zip(outputs, ranks, strict=True)
    ]
    weights, names = [layer.weight for layer in model], dict.fromkeys(map(id, [*model.parameters(), *downs, *ups]), "")
    laid = lay(weights, ups, names, {})
    wide = beside(weights, ups)
    assert wide is not None
    assert torch.equal(wide, laid)
    x = inputs()[0]
    bias = torch.cat([layer.bias for layer in model]).detach() if biased else None
    found = apply_wide(x, wide, bias, *downs, *ups, ranks=ranks)
    expected = [layer(x) + SCALING * (x @ down.T) @ up.T for layer, down, up in zip(model, downs, ups, strict=True)]
    mixes = [torch.randn(TOKENS, o, generator=generator, dtype=DOUBLE) for o in outputs]
    torch.testing.assert_close(list(found), expected)
    wanted = torch.autograd.grad(expected, (x, *downs, *ups), mixes)
    torch.testing.assert_close(torch.autograd.grad(found, (x, *downs, *ups), mixes), wanted)
    assert beside(weights[::-1], ups[::-1]) is None
    assert beside(weights, [*ups[:-1], ups[-1].detach().clone()]) is None


def test_only_matrices_in_the_same_rows_are_beside_each_other():
    weight, up = side_by_side(0)
    for one, other in (
        (weight, up.detach().clone()),  # elsewhere
        (weight.clone(), up),
        (up, weight),  # the other way round
        (weight[:, :5], weight[:, 3:6]),  # overlapping
        (weight, up[1:]),  # another row
        (weight.T, up),
    ):
        assert beside([one], [other]) is None
    joined = beside([weight], [up])
    assert joined is not None
    assert torch.equal(joined, torch.cat([weight, up], 1))


def expanding(model: nn.Module) -> list[Any]:
    layers = [m for n, m in model.named_modules() if n.endswith(("gate_proj", "up_proj")) and hasattr(m, "lora_A")]
    assert layers
    return layers


def test_the_engine_lays_them_so():
    model = with_adapter(twin(plain("qwen2")).bfloat16())
    for laid_out in (False, True):
        if laid_out:
            paged_over(model)
        for layer in expanding(model):
            up = layer.lora_B["default"].weight
            wide = beside([layer.base_layer.weight], [up])
            assert (wide is not None) == laid_out
            if wide is not None:
                assert torch.equal(wide[:, -up.shape[1] :], up)


@pytest.mark.gpu
def test_on_a_gpu_a_layer_computes_the_same_before_and_after():
    model = with_adapter(twin(plain("qwen2")).bfloat16()).cuda()
    layers = expanding(model)
    size = layers[0].in_features
    x = torch.randn(33, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run(layer: Any) -> list[Tensor]:
        output = layer(x)
        mix = torch.ones_like(output)
        return [
            output,
            *torch.autograd.grad(output, (x, layer.lora_A.default.weight, layer.lora_B.default.weight), mix),
        ]

    before = [run(layer) for layer in layers]
    paged_over(model)
    assert all(beside([layer.base_layer.weight], [layer.lora_B.default.weight]) is not None for layer in layers)
    together = [one for pair in zip(layers[::2], layers[1::2], strict=True) for one in both(*pair, x)]
    for layer, joined, expected in zip(layers, together, before, strict=True):
        for found in (run(layer), joined):
            for one, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(one, wanted, rtol=0.03, atol=0.03 * float(wanted.detach().abs().max()))


def both(gate: Any, up: Any, x: Tensor) -> list[list[Tensor]]:
    """Of each layer: its output and the gradients that it alone gives, from the one product of both."""
    outputs = LoraLinear.together([gate, up], x)
    assert outputs is not None
    return [
        [
            output,
            *torch.autograd.grad(
                output,
                (x, layer.lora_A.default.weight, layer.lora_B.default.weight),
                torch.ones_like(output),
                retain_graph=True,
            ),
        ]
        for layer, output in zip((gate, up), outputs, strict=True)
    ]
