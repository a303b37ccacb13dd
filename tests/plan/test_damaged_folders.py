"""Plan, doctor and train say the same of a model's folder that is damaged, before a run has a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lockstep.cli import main
from lockstep.config.load import load
from lockstep.errors import ModelError
from lockstep.loops.preflight import preflight, start_checks
from tests.loops.runs import words


def rewrite(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def index_without_metadata(folder: Path) -> None:
    names = {"model.embed_tokens.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def generation_of_a_list(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[1]")


def fewer_heads(folder: Path) -> None:
    rewrite(folder / "config.json", num_key_value_heads=1)


def no_head(folder: Path) -> None:
    rewrite(folder / "config.json", tie_word_embeddings=False)


def layers_in_words(folder: Path) -> None:
    rewrite(folder / "config.json", num_hidden_layers="two")


def no_layers(folder: Path) -> None:
    rewrite(folder / "config.json", num_hidden_layers=0)


def negative_context(folder: Path) -> None:
    rewrite(folder / "config.json", max_position_embeddings=-1)


DAMAGED: list[tuple[Callable[[Path], None], str]] = [
    (index_without_metadata, "index.json: the index of weight files has no mapping called metadata"),
    (generation_of_a_list, "generation_config.json: the JSON file holds a list, not a mapping"),
    (fewer_heads, "4 tensors (model.layers.0.self_attn.k_proj.weight, "),
    (no_head, "1 tensor (lm_head.weight) missing in the weight files or of another shape"),
    (layers_in_words, "model: config.json describes no model that transformers can build: Strict"),
    (no_layers, "config.json says num_hidden_layers = 0, but the least is 1"),
    (negative_context, "config.json says max_position_embeddings = -1, but the least is 0"),
]  # fmt: skip
"""What is done to a folder, and what is said of it."""


@pytest.mark.parametrize(("damage", "says"), DAMAGED)
def test_the_commands_say_the_same_of_a_damaged_folder(
    damage: Callable[[Path], None],
    says: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    damage(folder)
    args = words(tmp_path, folder)
    for command in ("plan", "doctor", "train"):
        assert main([command, *args, *(["--json"] if command == "doctor" else [])]) != 0
        printed = capsys.readouterr()
        if command == "doctor":
            checks = json.loads(printed.out)["checks"]
            assert [says in check["found"] for check in checks if check["verdict"] == "fail"].count(True) >= 1
        else:
            assert says in printed.err
            assert printed.err.count("to fix:") == 1
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_of_a_larger_embedding_is_refused_before_a_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:300].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite(folder / "config.json", vocab_size=300)
    wanted = load(words(tmp_path, folder))
    with pytest.raises(ModelError, match="the model's embedding has only 300 rows") as caught:
        preflight(wanted)
    failed = {check.name: check.found for check in start_checks(wanted) if check.verdict == "fail"}
    assert caught.value.what in failed["prompts"]
