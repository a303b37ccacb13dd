"""Checkpoints of verl, OpenRLHF and TRL become folders that everything here takes; what is not whole is refused."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lockstep.errors import CheckpointError, ConfigError
from lockstep.export.import_checkpoint import import_checkpoint
from lockstep.models.foreign import Kind, find_foreign
from lockstep.models.torch_files import joined, load_torch_file
from lockstep.scoring.targets import build_eval_session, find_target
from tests.learner.models import logprobs_of, tokens
from tests.loops.runs import words
from tests.saying import Printed
from tests.tiny import write_tiny_model

WORLD = Path(__file__).with_name("verl_world.py")
IDS = tokens(30, 3)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that some other program trained."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_model(folder, seed=11, layers=3, tied=request.param)
    return folder


@pytest.fixture(scope="module")
def verl(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """verl's folder of steps."""
    folder = tmp_path_factory.mktemp("verl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(WORLD), str(trained), str(folder / "global_step_29" / "actor"), str(port)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    (folder / "latest_checkpointed_iteration.txt").write_text("29")
    return folder


def test_verl_shards_are_imported_and_evaluated(verl: Path, trained: Path, tmp_path: Path, printed: Printed) -> None:
    out = tmp_path / "out"
    assert "FSDP shards of verl of step 29" in printed("import", verl, out)
    plain = AutoModelForCausalLM.from_pretrained(trained).eval()
    own = load_file(out / "model.safetensors")
    for name, parameter in plain.named_parameters():
        assert torch.equal(own.pop(name), parameter), name
    assert own == {}
    session = build_eval_session(find_target(str(out), words(tmp_path, trained)).recipe)
    session.prove()
    scored = torch.tensor(session.engine.score([IDS])[0])
    torch.testing.assert_close(scored, logprobs_of(plain, IDS), rtol=0, atol=1e-4)
    arguments = [
        "eval",
        str(out),
        "--recipe",
        *words(tmp_path, trained),
        "--mode",
        "greedy",
        "--items",
        "4",
        "--no-base",
    ]
    assert "id_probe" in printed(*arguments, "--out", tmp_path / "scores")


def test_shards_that_do_not_fit_are_refused(verl: Path, tmp_path: Path) -> None:
    shutil.copytree(verl, tmp_path / "verl")
    actor = tmp_path / "verl" / "global_step_29" / "actor"
    config = json.loads((actor / "huggingface" / "config.json").read_text())
    (actor / "huggingface" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight has the shape .*, but config\.json gives"):
        import_checkpoint(find_foreign(actor), tmp_path / "out")
    (actor / "huggingface" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"9 tensors are missing, such as model\.layers\.3"):
        import_checkpoint(find_foreign(actor), tmp_path / "out")
    first, second = (actor / f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1))
    with pytest.raises(CheckpointError, match="make the shape"):
        joined([first])
    second.unlink()
    with pytest.raises(CheckpointError, match="rank 1 of 2 has no file"):
        find_foreign(actor)
    assert not (tmp_path / "out").exists()


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("/tmp/lockstep-was-here"),)  # type: ignore[return-value]


def test_a_shard_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"model.norm.weight": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        load_torch_file(tmp_path / "evil.pt")
    assert not Path("/tmp/lockstep-was-here").exists()
    torch.save({"model.norm.weight": "text"}, tmp_path / "text.pt")
    with pytest.raises(CheckpointError, match="is a str, not a tensor"):
        joined([tmp_path / "text.pt"])
    (tmp_path / "rubbish.pt").write_bytes(b"not a file of torch")
    with pytest.raises(CheckpointError, match="cannot be read as tensors"):
        load_torch_file(tmp_path / "rubbish.pt")


@pytest.mark.sampled("tied")
def test_an_evaluation_points_to_import(verl: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lockstep import"):
        find_target(str(verl / "global_step_29"), words(tmp_path, trained))


@pytest.mark.sampled("tied")
def test_a_step_is_not_guessed(verl: Path, tmp_path: Path) -> None:
    shutil.copytree(verl, tmp_path / "verl")
    shutil.copytree(verl / "global_step_29", tmp_path / "verl" / "global_step_9")
    with pytest.raises(CheckpointError, match="several steps: 9, 29"):
        find_foreign(tmp_path / "verl")
    assert find_foreign(tmp_path / "verl", 9).step == 9
    with pytest.raises(CheckpointError, match="no step 7, only 9, 29"):
        find_foreign(tmp_path / "verl", 7)


def test_an_adapter_of_verl(trained: Path, tmp_path: Path) -> None:
    place = tmp_path / "global_step_29" / "actor" / "lora_adapter"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(trained), LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(place)
    found = find_foreign(tmp_path / "global_step_29")
    assert (found.kind, found.path, found.step) == (Kind.ADAPTER, place, 29)
    with pytest.raises(
        ConfigError, match=r"--config, --dtype cannot be used: .* is an adapter, which is copied unchanged"
    ):
        import_checkpoint(found, tmp_path / "out", config=trained, dtype="bf16")
    assert not (tmp_path / "out").exists()
    done = import_checkpoint(found, tmp_path / "out")
    assert done.base == str(trained)
    session = build_eval_session((target := find_target(str(tmp_path / "out"), words(tmp_path, trained))).recipe)
    assert target.adapter is not None
    session.prove_saved(session.read_adapter(target.adapter))
    expected = logprobs_of(model.eval(), IDS)
    torch.testing.assert_close(torch.tensor(session.engine.score([IDS])[0]), expected, rtol=0, atol=1e-4)


def test_trl(trained: Path, tmp_path: Path) -> None:
    place = tmp_path / "trl" / "checkpoint-100"
    shutil.copytree(trained, place)
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 100}))
    torch.save({}, place / "optimizer.pt")
    done = import_checkpoint(find_foreign(tmp_path / "trl"), tmp_path / "out", dtype="bf16")
    assert (done.kind, done.step, done.dtype, done.left) == (Kind.MODEL, 100, "bfloat16", ("optimizer.pt",))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match="exists already"):
        import_checkpoint(find_foreign(tmp_path / "trl"), tmp_path / "out")


def test_files_of_another_save_are_not_imported(trained: Path, tmp_path: Path) -> None:
    """A trainer that saved into the same folder with more files before leaves some of them there; the index has none of them."""
    place, other = tmp_path / "checkpoint-10", tmp_path / "other"
    shutil.copytree(trained, place)
    (place / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(trained)
    model.save_pretrained(place, max_shard_size="200KB")
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    model.save_pretrained(other, max_shard_size="100KB")
    count = len(list(place.glob("model-*")))
    for file in other.glob("model-*"):
        shutil.copy(file, place)
    assert len(list(place.glob("model-*"))) > count > 1
    import_checkpoint(find_foreign(place), tmp_path / "out")
    own, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(trained / "model.safetensors")
    assert all(torch.equal(own.pop(name), tensor) for name, tensor in theirs.items())
    assert own == {}


def test_openrlhf(trained: Path, tmp_path: Path) -> None:
    """--ckpt_path: DeepSpeed's states of ZeRO 2 hold the whole module; config and tokenizer are those of the model."""
    place = tmp_path / "ckpt" / "_actor" / "global_step20"
    place.mkdir(parents=True)
    (place.parent / "latest").write_text("global_step20")
    model = AutoModelForCausalLM.from_pretrained(trained)
    states = {
        "module": {f"module.{n}": p.detach().bfloat16() for n, p in model.state_dict().items()},
        "ds_version": "0.16",
    }
    torch.save(states, place / "mp_rank_00_model_states.pt")
    found = find_foreign(tmp_path / "ckpt")
    assert (found.kind, found.step) == (Kind.DEEPSPEED, 20)
    with pytest.raises(CheckpointError, match="no config"):
        import_checkpoint(found, tmp_path / "out")
    import_checkpoint(found, tmp_path / "out", config=trained)
    own = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(own[name], p.bfloat16()) for name, p in model.named_parameters())
    shutil.copytree(trained, place.parent / "global_step20_hf")
    assert find_foreign(tmp_path / "ckpt").kind is Kind.MODEL


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tied=True)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="head and the embedding differ"):
        import_checkpoint(find_foreign(tmp_path), tmp_path / "out")
