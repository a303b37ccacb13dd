from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lockstep.checkpoint.state import (
    CheckpointState,
    ModelFiles,
    read_state,
    read_tensors,
    save_state,
    write_files,
    write_tensors,
)
from lockstep.checkpoint.store import open_checkpoint
from lockstep.errors import CheckpointError, CorruptCheckpointError
from lockstep.sync.fingerprint import fingerprint


def tiny_model(seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def test_state_comes_back_bit_for_bit(tmp_path: Path):
    weights = {"a": torch.randn(3, 4).bfloat16(), "b": torch.tensor([float("nan"), -0.0]), "c": torch.zeros(0, 2)}
    optimizer = {"a.moment": torch.randn(3, 4, dtype=torch.float64).T, "step": torch.tensor(7)}
    state = CheckpointState(12, weights, optimizer, {"version": 12, "fingerprint": "ab"})
    save_state(tmp_path, state, ModelFiles())
    back = read_state(open_checkpoint(tmp_path))
    assert (back.step, back.meta) == (12, {"version": 12, "fingerprint": "ab"})
    for ours, theirs in ((weights, back.weights), (optimizer, back.optimizer)):
        assert fingerprint(iter(ours.items())) == fingerprint(iter(theirs.items()))


def test_the_same_state_gives_the_same_bytes(tmp_path: Path):
    state = CheckpointState(1, {f"w{i}": torch.full((5,), float(i)) for i in range(50)}, {"m": torch.ones(3)}, {"a": 1})
    folders = [save_state(tmp_path / name, state, ModelFiles()) for name in ("one", "two")]
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second


def test_transformers_loads_the_folder(tmp_path: Path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "base" / "modeling_evil.py").write_text("raise SystemExit")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = CheckpointState(3, weights, {"m": torch.zeros(1)})
    path = save_state(tmp_path, state, ModelFiles(copy_from=tmp_path / "base"))
    names = {file.name for file in path.iterdir()}
    assert {"model.safetensors", "config.json", "chat_template.jinja", "optimizer.safetensors", "state.json"} <= names
    assert "modeling_evil.py" not in names
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert fingerprint((n, p.detach()) for n, p in loaded.named_parameters()) == fingerprint(iter(weights.items()))
    open_checkpoint(tmp_path)  # loading it elsewhere changed nothing


def test_a_checkpoint_can_be_the_model_of_the_next_run(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path / "base")
    state = CheckpointState(3, {"w": torch.ones(2)}, {}, {"from": "base"})
    first = save_state(tmp_path / "a", state, ModelFiles(copy_from=tmp_path / "base"))
    second = CheckpointState(1, {"w": torch.ones(2)}, {}, {"from": "a"})
    save_state(tmp_path / "b", second, ModelFiles(copy_from=first))
    assert open_checkpoint(tmp_path / "b").meta == {"from": "a"}
    (tmp_path / "c").mkdir()
    write_files(tmp_path / "c", second, ModelFiles(copy_from=first))
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert not names & {"COMMIT.json", "state.json"}  # an old COMMIT.json would vouch for a save that is not finished


def test_peft_loads_the_folder(tmp_path: Path):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapter = get_peft_model_state_dict(model)
    config.save_pretrained(tmp_path / "config")
    text = (tmp_path / "config" / "adapter_config.json").read_text()
    files = ModelFiles("adapter_model.safetensors", texts={"adapter_config.json": text})
    path = save_state(tmp_path, CheckpointState(2, adapter, {}), files)
    loaded = PeftModel.from_pretrained(tiny_model(), path)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert not torch.equal(loaded(ids).logits, tiny_model()(ids).logits)
    assert read_state(open_checkpoint(tmp_path)).weights.keys() == adapter.keys()
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4


def test_tied_weights_given_twice_are_refused_and_named(tmp_path: Path):
    weight = torch.zeros(4, 4)
    state = CheckpointState(1, {"lm_head.weight": weight, "model.embed_tokens.weight": weight}, {})
    with pytest.raises(CheckpointError, match=r"share memory.*lm_head\.weight") as caught:
        save_state(tmp_path, state, ModelFiles())
    assert "once" in caught.value.fix
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_slices_of_one_tensor_are_saved(tmp_path: Path):
    whole = torch.arange(8.0)
    write_tensors(tmp_path / "a.safetensors", {"low": whole[:4], "high": whole[4:]})
    assert read_tensors(tmp_path / "a.safetensors")["high"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_folder_without_config_cannot_be_copied_from(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        save_state(tmp_path, CheckpointState(1, {}, {}), ModelFiles(copy_from=tmp_path / "empty"))


def test_the_space_is_checked_for_the_tensors_there_are(tmp_path: Path):
    state = CheckpointState(1, {"w": torch.zeros(1).expand(1 << 40)}, {"m": torch.zeros(1).expand(1 << 41)})
    assert state.bytes == 12 << 40
    with pytest.raises(CheckpointError, match=r"needs 12288\.02 GiB"):
        save_state(tmp_path, state, ModelFiles())


def test_two_weights_files_or_none_are_refused(tmp_path: Path):
    path = save_state(tmp_path, CheckpointState(1, {"w": torch.ones(1)}, {}), ModelFiles())
    info = open_checkpoint(tmp_path)
    write_tensors(path / "adapter_model.safetensors", {"w": torch.ones(1)})
    with pytest.raises(CorruptCheckpointError, match="expected one file of weights"):
        read_state(info)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path):
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04nothing")
    with pytest.raises(CorruptCheckpointError, match=r"x\.safetensors: cannot be read"):
        read_tensors(tmp_path / "x.safetensors")
