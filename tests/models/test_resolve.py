from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models import Source, resolve


@pytest.fixture
def folder(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def add_to_config(folder: Path, **entries: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def test_a_folder_resolves_to_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(Model(path=str(folder)))
    assert (resolved.path, resolved.source, resolved.revision) == (folder, Source.FOLDER, None)
    monkeypatch.chdir(folder.parent)
    assert resolve(Model(path="model")).path == folder
    assert resolve(Model(path="./model")).path == folder


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


def lacks_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def gguf_only(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "holds a list"),
        (lambda folder: (folder / "config.json").write_text("[" * 10**5), "is not valid JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "the weight file model.safetensors is missing"),
        (pickle_only, "only pickle weights"),
        (lacks_a_shard, "model-00002-of-00002.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (adapter, "an adapter for org/base"),
        (gguf_only, "GGUF files cannot be used as a model"),
        (no_tokenizer, "no tokenizer"),
        (
            lambda folder: add_to_config(folder, model_type="own", auto_map={"AutoModelForCausalLM": "own.Model"}),
            "needs its own Python code",
        ),
        (lambda folder: add_to_config(folder, quantization_config={"quant_method": "awq"}), "quant_method: awq"),
        (
            lambda folder: add_to_config(folder, text_config={"quantization_config": {"quant_method": "gptq"}}),
            "quant_method: gptq",
        ),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_a_folder_that_will_not_do_is_refused_with_the_reason(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(Model(path=str(folder)))
    assert caught.value.where.startswith(str(folder))
    assert "\n" not in caught.value.what


def test_code_of_the_model_needs_the_users_word_unless_transformers_has_its_own(folder: Path) -> None:
    add_to_config(folder, auto_map={"AutoModelForCausalLM": "own.Model"})
    assert resolve(Model(path=str(folder))).path == folder, "llama is known: its own code is never run"
    add_to_config(folder, model_type="own")
    assert resolve(Model(path=str(folder), trust_remote_code=True)).trust_remote_code


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match="this is a file, but a model is a folder"):
        resolve(Model(path=str(tmp_path / "x.gguf")))


def test_a_path_of_several_parts_is_a_folder_even_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        resolve(Model(path="runs/mine/export"))


@pytest.mark.parametrize("name", ["smollm2-135m", "smolm2-135m-instruct", "SmolLM2-135M-Instruct"])
def test_a_misspelt_builtin_name_gets_the_nearest(name: str) -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m-instruct\?"):
        resolve(Model(path=name))


def test_a_name_unlike_any_lists_what_may_be_given() -> None:
    with pytest.raises(ModelError) as caught:
        resolve(Model(path="gpt9"))
    assert "did you mean" not in str(caught.value)
    assert "smollm2-135m-instruct" in caught.value.fix
    assert "org/name" in caught.value.fix


def test_a_revision_where_there_are_none_is_refused(folder: Path) -> None:
    for path in (str(folder), "smollm2-135m-instruct"):
        with pytest.raises(ModelError, match="does not exist"):
            resolve(Model(path=path, revision="v1"))


def test_resolving_a_folder_loads_no_torch(folder: Path) -> None:
    script = (
        "import sys; from lockstep.config.schema import Model; from lockstep.models import resolve; "
        f"resolve(Model(path={str(folder)!r})); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
