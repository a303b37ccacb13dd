"""Fused and padded layouts mapped back to the checkpoint's names, against the checkpoint itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep.errors import EngineError
from lockstep.rollout.vllm.layout import checked, checkpoint_views, share
from lockstep.sync.fingerprint import fingerprint
from tests.rollout.vllm.fused import FusedLlama


def llama(
    *, tied: bool = True, bias: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=150,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,  # more query outputs than hidden ones: rows and columns cannot be confused
        attention_bias=bias,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def laid_out(model: LlamaForCausalLM) -> FusedLlama:
    engine = FusedLlama(model.config).to(model.dtype)
    engine.load_weights((name, parameter.detach()) for name, parameter in model.named_parameters())
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_views_are_the_checkpoint(tied: bool, bias: bool, dtype: torch.dtype):
    model = llama(tied=tied, bias=bias, dtype=dtype)
    engine = laid_out(model)
    assert not any(parameter.isnan().any() for parameter in engine.parameters()), "all of it was loaded"
    found, wanted = dict(checkpoint_views(engine)), dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(found[name], parameter), name
    assert fingerprint(checkpoint_views(engine)) == fingerprint((n, p.detach()) for n, p in wanted.items())


def test_fused_by_hand():
    """Rows of the fused matrix, written out."""
    engine = laid_out(llama())
    attention = engine.model.layers[1].self_attn.qkv_proj.weight
    views = dict(checkpoint_views(engine))
    assert torch.equal(views["model.layers.1.self_attn.q_proj.weight"], attention[:96])
    assert torch.equal(views["model.layers.1.self_attn.k_proj.weight"], attention[96:128])
    assert torch.equal(views["model.layers.1.self_attn.v_proj.weight"], attention[128:160])
    gate_up = engine.model.layers[0].mlp.gate_up_proj.weight
    assert torch.equal(views["model.layers.0.mlp.gate_proj.weight"], gate_up[:80])
    assert torch.equal(views["model.layers.0.mlp.up_proj.weight"], gate_up[80:])
    assert views["model.embed_tokens.weight"].shape == (150, 48)
    assert engine.model.embed_tokens.weight.shape == (192, 48)


def test_the_usual_fusions_need_not_be_told():
    engine = laid_out(llama())
    told = [name for name, _ in checkpoint_views(engine)]
    engine.packed_modules_mapping = {}
    assert [name for name, _ in checkpoint_views(engine)] == told
    engine.packed_modules_mapping = {"qkv_proj": ["qkv_proj"]}  # fused in the checkpoint too (Phi-3)
    assert "model.layers.0.self_attn.qkv_proj.weight" in dict(checkpoint_views(engine))


def test_the_views_are_the_memory_itself():
    """What is written into a view is what the engine computes with, and the padding stays out of it."""
    engine = laid_out(llama())
    before = fingerprint(checkpoint_views(engine))
    for name, view in checkpoint_views(engine):
        view.add_(1)
        changed = fingerprint(checkpoint_views(engine))
        assert [n for n in changed.tensors if changed.tensors[n] != before.tensors[n]] == [name]
        before = changed
    engine.model.embed_tokens.weight[150:] = 7
    assert fingerprint(checkpoint_views(engine)) == before, "the padding samples nothing"


def test_one_wrong_row_is_seen_wherever_it_is():
    model = llama(bias=True)
    wanted = fingerprint((n, p.detach()) for n, p in model.named_parameters())
    engine = laid_out(model)
    for name, parameter in engine.named_parameters():
        for row in (0, 100 if "embed" in name else len(parameter) - 1, len(parameter) // 2):
            kept = parameter.data[row].clone()
            parameter.data[row] = kept + 1
            found = fingerprint(checkpoint_views(engine))
            assert sum(found.tensors[n] != wanted.tensors[n] for n in wanted.tensors) == 1, (name, row)
            parameter.data[row] = kept
    assert fingerprint(checkpoint_views(engine)) == wanted


def test_renamed_prefixes_are_renamed_back():
    engine = laid_out(llama())
    rules = {"model.layers.": "model.layers.", "backbone.embed": "model.embed", "vision.": None}
    engine.hf_to_vllm_mapper = SimpleNamespace(orig_to_new_prefix=rules, orig_to_new_substr={"_quantizer.": None})
    names = [name for name, _ in checkpoint_views(engine)]
    assert names[0] == "backbone.embed_tokens.weight"
    assert "model.layers.0.self_attn.q_proj.weight" in names


def test_parts_and_ends_of_names_are_renamed_back():
    engine = laid_out(llama())
    engine.hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_substr={".attention.": ".self_attn."}, orig_to_new_suffix={".scale": ".weight", "absent": None}
    )
    names = [name for name, _ in checkpoint_views(engine)]
    assert names[0] == "model.embed_tokens.scale"
    assert "model.layers.0.attention.q_proj.scale" in names


@pytest.mark.parametrize(
    ("mapper", "told"),
    [
        ({"orig_to_new_substr": {".a.": ".self_attn.", ".b.": ".self_attn."}}, "one name .orig_to_new_substr"),
        ({"orig_to_new_suffix": {".w": ".weight", ".scale": ".weight"}}, "one name .orig_to_new_suffix"),
        ({"orig_to_new_renamings": ["anything"]}, "orig_to_new_renamings"),
        ({"orig_to_new_regex": {"anything": "other"}}, "orig_to_new_regex"),
        ({"orig_to_new_prefix": {"model.": ""}}, "removes a prefix from"),
    ],
)
def test_other_renamings_are_refused(mapper: dict[str, object], told: str):
    engine = laid_out(llama())
    engine.hf_to_vllm_mapper = SimpleNamespace(**mapper)
    with pytest.raises(EngineError, match=told) as caught:
        list(checkpoint_views(engine))
    assert "rollout.engine=native" in caught.value.fix


def test_layouts_that_do_not_add_up_are_refused():
    engine = laid_out(llama())
    engine.model.layers[1].mlp.gate_up_proj.output_sizes = [80, 79]
    with pytest.raises(EngineError, match=r"shape \[160, 48\], but gate_proj, up_proj have \[80, 79\] rows"):
        list(checkpoint_views(engine))
    engine = laid_out(llama())
    engine.model.norm.tp_size = 2
    with pytest.raises(EngineError, match=r"model\.norm\.weight: vLLM splits this layer over 2 GPUs"):
        list(checkpoint_views(engine))


def test_a_name_without_a_place_is_refused_before_it_is_lost():
    model = llama()
    known = frozenset(name for name, _ in checkpoint_views(laid_out(model)))
    stream = iter([("model.norm.weight", torch.zeros(48)), ("block.0.weight", torch.zeros(2))])
    with pytest.raises(
        EngineError, match=r"/models/x: vLLM's FusedLlama has no parameter for block\.0\.weight"
    ) as caught:
        list(checked(stream, known, "FusedLlama", "/models/x"))
    assert "rollout.engine=native" in caught.value.fix


# --- one set of weights for learner and engine ----------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
def test_shared_parameters_train_the_engines_memory(tied: bool):
    model = llama(tied=tied, bias=True)
    engine = laid_out(model)
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    names = share(model, checkpoint_views(engine))
    assert names == sorted(name for name, _ in model.named_parameters())
    assert torch.equal(model(input_ids=ids).logits, before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    start = fingerprint(checkpoint_views(engine))
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = fingerprint(checkpoint_views(engine))
    assert after == fingerprint((n, p.detach()) for n, p in model.named_parameters())
    assert all(after.tensors[name] != start.tensors[name] for name in names)
    fused = engine.model.layers[0].self_attn.qkv_proj.weight
    assert (
        fused.untyped_storage().data_ptr() == model.model.layers[0].self_attn.v_proj.weight.untyped_storage().data_ptr()
    )
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_nothing_is_shared_of_unequal_weights():
    model = llama()
    engine = laid_out(model)
    engine.model.layers[1].mlp.down_proj.weight[3, 3] += 1
    storages = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.down_proj\.weight: the values in vLLM differ"):
        share(model, checkpoint_views(engine))
    with pytest.raises(EngineError, match="which one of them lacks"):
        share(model, (pair for pair in checkpoint_views(engine) if "norm" not in pair[0]))
    with pytest.raises(EngineError, match="transport=copy"):
        share(model, ((name, view.double()) for name, view in checkpoint_views(engine)))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == storages


def test_a_stub_without_attributes_is_taken_as_it_is():
    model = nn.Sequential(nn.Linear(3, 2))
    assert [(name, tuple(view.shape)) for name, view in checkpoint_views(model)] == [
        ("0.weight", (2, 3)),
        ("0.bias", (2,)),
    ]
