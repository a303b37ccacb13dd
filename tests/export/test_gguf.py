"""A run as one GGUF file: read back by our reader and by transformers' own, and refused where the format has no word for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import lockstep.models.gguf_writer as writer
from lockstep.commands import export as command
from lockstep.errors import ConfigError, ExportError, ModelError
from lockstep.export import check
from lockstep.export.export import Exported, export
from lockstep.export.verify import EXACT, in_fresh_process
from lockstep.models.convert import convert_gguf, read_gguf
from lockstep.models.gguf_facts import SPLITS, find_split
from lockstep.models.gguf_writer import write_gguf
from lockstep.scoring.targets import find_target
from lockstep.track.rundir import RunDirectory
from tests.gallery import Gallery
from tests.learner.models import SMALL, logprobs_of, tokens
from tests.loops.runs import LORA, NO_EVAL, trained
from tests.tiny import VOCABULARY, write_tiny_model, write_tiny_tokenizer

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}
IDS = tokens(30, 3)
NEXT = 508
"""The first id that the tiny tokenizer leaves free."""
TEXT = "State  the 12345 can't CAN'T Ünï 日本\n\n\n  x\t<|im_end|> and so"


def family(folder: Path, name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    kind, settings = FAMILIES[name]
    config = getattr(hf, f"{kind}Config")(**(SMALL | {"vocab_size": VOCABULARY} | settings | more))
    folder.mkdir()
    torch.manual_seed(1)
    model = getattr(hf, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # biases and norms begin as zeros and ones
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.to(dtype).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def gguf(run: RunDirectory, out: Path) -> Exported:
    return export(find_target(str(run.path)), out, gguf=True, check=check.answer)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_comes_back_bit_by_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = family(tmp_path / "model", name, dtype)
    write_gguf(model, tmp_path / "model.gguf")
    (tmp_path / "back").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    for key in before:
        assert torch.equal(before[key].float(), after[key]), key
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.testing.assert_close(logprobs_of(mine, IDS), logprobs_of(theirs, IDS), rtol=0, atol=1e-6)


def test_a_template_comes_back_where_the_locale_is_not_utf_8(tmp_path: Path) -> None:
    model, back = family(tmp_path / "model", "llama"), tmp_path / "back"
    back.mkdir()
    template = "{# é #}{{ messages[0]['content'] }}"
    (model / "chat_template.jinja").write_text(template, "utf-8")
    write_gguf(model, tmp_path / "model.gguf")
    code = "import sys; from pathlib import Path; from lockstep.models.convert import convert_gguf; "
    code += "convert_gguf(*map(Path, sys.argv[1:]))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "model.gguf"), str(back)]
    subprocess.run(command, env=os.environ | locale, check=True)
    assert (back / "chat_template.jinja").read_text("utf-8") == template


@pytest.mark.parametrize("name", FAMILIES)
def test_another_reader_sees_the_same_model(name: str, tmp_path: Path) -> None:
    """transformers has a GGUF reader of its own, which takes every Qwen3 to have heads of 128 numbers."""
    model = family(tmp_path / "model", name, **({"head_dim": 128} if name == "qwen3" else {}))
    (tmp_path / "out").mkdir()
    write_gguf(model, tmp_path / "out" / "model.gguf")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").eval()
    expected = AutoModelForCausalLM.from_pretrained(model).eval()
    torch.testing.assert_close(logprobs_of(found, IDS), logprobs_of(expected, IDS), rtol=0, atol=EXACT)


def test_a_run_is_exported_and_proven(gallery: Gallery, tmp_path: Path) -> None:
    done = export(
        find_target(str(gallery.run("plain_lora").path), step=3), tmp_path / "out", gguf=True, check=in_fresh_process
    )
    assert done.verified.trained.max <= EXACT
    assert done.verified.base.mean > 1e-3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "lockstep_export.json", "model.gguf",
    ]  # fmt: skip
    assert not list(tmp_path.glob(".out*"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama.cpp itself was not run" in card
    assert json.loads((tmp_path / "out" / "lockstep_export.json").read_text())["kind"] == "gguf"


def test_a_bf16_run_is_bf16_in_the_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    run = trained(tmp_path, tiny_model_dir, *LORA, NO_EVAL, "steps=1", "model.dtype=bf16", "optimizer.lr=0.05")
    done = gguf(run, tmp_path / "out")
    fields = read_gguf(tmp_path / "out" / "model.gguf").fields
    assert (done.dtype, fields["general.file_type"]) == ("bfloat16", 32)
    assert fields["general.name"] == run.name
    assert done.verified.trained.max <= done.verified.tolerance.max
    size = (tmp_path / "out" / "model.gguf").stat().st_size
    assert done.bytes < size < done.bytes + 60_000  # fp32 norms, tokenizer


def test_rows_in_another_order_are_refused(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer without llama.cpp's reordering would make: the same numbers, another model."""
    monkeypatch.setattr(writer, "permute", lambda rows, heads: rows)
    with pytest.raises(ExportError, match="log-probabilities differ from"):
        gguf(gallery.run("plain"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_lost_chat_template_is_refused(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writer._add_vocabulary

    def without(target: Any, vocabulary: Any, folder: Path) -> None:
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        real(target, vocabulary, folder)

    monkeypatch.setattr(writer, "_add_vocabulary", without)
    with pytest.raises(ExportError, match="ids of a chat"):
        gguf(gallery.run("plain"), tmp_path / "out")


# --- tokenizers -----------------------------------------------------------------------------------------------------
def rewritten(
    folder: Path, split: str, *, nfc: bool = False, bos: bool = False, user: str = "", place: int = NEXT
) -> None:
    """The tiny tokenizer with another way to cut text."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [dict(step) for step in SPLITS[split].steps]}
    for step in content["pre_tokenizer"]["pretokenizers"]:
        if step["type"] == "ByteLevel":
            step["trim_offsets"] = False
    content["model"]["ignore_merges"] = SPLITS[split].ignore_merges
    if nfc:
        content["normalizer"] = {"type": "NFC"}
    if bos:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
        }
    if user:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        content["added_tokens"].append({"id": place, "content": user, **flags})
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("split", SPLITS)
def test_a_tokenizer_comes_back(split: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model")
    rewritten(tmp_path / "model", split, nfc=split == "qwen2", bos=split == "llama-bpe", user="<tool_call>")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert read_gguf(tmp_path / "model.gguf").fields["tokenizer.ggml.pre"] == split
    (tmp_path / "back").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "back"))
    text = TEXT + " <tool_call> "
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert (after("a")["input_ids"][0] == 1) is (split == "llama-bpe")
    assert NEXT in after(text)["input_ids"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
        assert getattr(after, name) == getattr(before, name)


def test_splits_are_what_tokenizers_makes_of_them(tmp_path: Path) -> None:
    """The table in SPLITS against tokenizers' own objects: a family's published tokenizer.json is found in it."""
    regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert find_split(json.loads(tokenizer.to_str())) == "smollm"
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    assert find_split(json.loads(tokenizer.to_str())) == "qwen2"
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert find_split(json.loads(tokenizer.to_str())) == "gpt-2"
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert find_split(json.loads(tokenizer.to_str())) is None


# --- refusals -------------------------------------------------------------------------------------------------------
@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def refused(model: Path, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        write_gguf(model, model.with_suffix(".gguf"))


@pytest.mark.parametrize(
    ("file", "more", "text"),
    [
        (
            "config",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = linear",
        ),
        ("config", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("config", {"attention_bias": True}, "attention_bias = True"),
        ("config", {"mlp_bias": True}, "mlp_bias = True"),
        ("config", {"model_type": "gemma3_text"}, "type is gemma3_text"),
        ("config", {"vocab_size": 100}, "the model has only 100 tokens"),
        ("tokenizer", {"normalizer": {"type": "Lowercase"}}, "normalizer of type Lowercase"),
        ("tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}, "no name for"),
        ("tokenizer", {"pre_tokenizer": None}, "no name for"),
        ("tokenizer", {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "not byte-level BPE"),
    ],
)
def test_what_the_format_cannot_express(file: str, more: dict[str, Any], text: str, model: Path) -> None:
    path = model / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    refused(model, text)


def test_a_token_with_blanks_around_it(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][2]["rstrip"] = True
    path.write_text(json.dumps(content))
    refused(model, "strips spaces")


def test_a_token_whose_id_is_another(model: Path) -> None:
    """tokenizers gives a new token the next free id, whatever tokenizer.json says."""
    rewritten(model, "smollm", user="<tool_call>", place=600)
    refused(model, "'<tool_call>', have other ids")


def test_an_adapter_alone_is_no_gguf(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    asked = parser.parse_args(["export", "run", str(tmp_path / "out"), "--format", "gguf", "--adapter"])
    with pytest.raises(ConfigError, match="--format gguf and --adapter cannot be used together"):
        command.run(asked)
