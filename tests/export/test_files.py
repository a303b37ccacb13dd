"""Which of a model's own files go into an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lockstep.errors import ExportError
from lockstep.export.files import copy_model_files


@pytest.fixture
def coded(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model of a type that transformers knows, with code of its own beside it."""
    source = tmp_path / "model"
    source.mkdir()
    config = json.loads((tiny_model_dir / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    (source / "tokenizer_config.json").write_text("{}")
    (source / "own.py").write_text("raise SystemExit")
    return source


def test_code_that_did_not_run_is_neither_copied_nor_asked_for(coded: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    changed = copy_model_files(coded, tmp_path / "out", "float32", whole=True)
    assert "auto_map: removed, the model ran with transformers' own class" in changed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "tokenizer_config.json"]
    written, source = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", coded))
    assert "auto_map" not in written
    assert written.keys() - {"dtype", "torch_dtype"} == source.keys() - {"auto_map", "dtype", "torch_dtype"}


def test_a_model_whose_own_code_may_have_run_is_refused(coded: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="Python code of its own"):
        copy_model_files(coded, tmp_path / "out", "float32", whole=True, own_code=True)


def test_settings_of_the_machine_that_wrote_a_config_are_left_out(coded: Path, tmp_path: Path) -> None:
    """Plain readers of the export would follow them."""
    config = json.loads((coded / "config.json").read_text())
    kernels = {"_attn_implementation": "some-org/some-kernels"}
    (coded / "config.json").write_text(json.dumps(config | kernels | {"text_config": kernels | {"vocab_size": 640}}))
    (tmp_path / "out").mkdir()
    changed = copy_model_files(coded, tmp_path / "out", "float32", whole=True)
    assert any(one.startswith("_attn_implementation: removed") for one in changed)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "_attn_implementation" not in written
    assert written["text_config"] == {"vocab_size": 640}


def test_an_adapters_tokenizer_keeps_its_added_tokens(tiny_model_dir: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    model = json.loads((tiny_model_dir / "tokenizer.json").read_text())["model"]
    (source / "vocab.json").write_text(json.dumps(model["vocab"]))
    (source / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (source / "added_tokens.json").write_text(json.dumps({"<extra>": 600}))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    copy_model_files(source, out, "", whole=False)
    own, copied = (AutoTokenizer.from_pretrained(folder)("a<extra>b")["input_ids"] for folder in (source, out))
    assert own == copied
