"""Several adapters over one base: each as if it were alone, the base in between, and nothing that does not belong to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.build.adapter_folder import AdapterTarget, adapter_settings, find_adapter
from lockstep.config.adapter import NoAdapter
from lockstep.config.schema import Lora, OtherPeft
from lockstep.errors import EngineError, ModelError
from lockstep.learner.adapter_files import BASE, Base, save_adapter
from lockstep.learner.adapter_set import AdapterSet
from lockstep.learner.adapters import attach
from lockstep.learner.merge import merged_weights
from lockstep.models.weights import named_weights
from lockstep.rollout.paged.engine import PagedEngine
from lockstep.sync.fingerprint import fingerprint
from tests.learner.models import logprobs_of, plain, tokens, twin
from tests.rollout.engines import engine_over

IDS = tokens(24, 5)
ADAPTERS = {
    "small": Lora(rank=2, targets=["q_proj"]),
    "large": Lora(rank=8, alpha=12, rslora=True),
    "lengths": Lora(rank=4, dora=True),
    "principal": Lora(rank=4, init="pissa"),
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A folder per adapter, each moved away from its start, and its log-probabilities beside it."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return {name: write(tmp_path / name, adapter, number) for number, (name, adapter) in enumerate(ADAPTERS.items())}


def write(folder: Path, adapter: Any, seed: int, family: str = "llama") -> Path:
    base: Any = plain(family)
    origin = Base.of(base, family)
    model = attach(base, adapter, seed, origin)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(folder, model, adapter, origin)
    (folder / "logprobs.json").write_text(json.dumps(logprobs_of(model, IDS).tolist()))
    return folder


def said(folder: Path) -> torch.Tensor:
    return torch.tensor(json.loads((folder / "logprobs.json").read_text()))


def empty_set(family: str = "llama") -> AdapterSet:
    model: Any = plain(family)
    return AdapterSet(model, Base.of(model, family))


def test_each_is_what_it_was_alone_in_any_order(folders: dict[str, Path]) -> None:
    base = plain("llama")
    adapters = empty_set()
    for name, folder in folders.items():
        assert adapters.attach(name, folder) == ""
    assert adapters.names == tuple(ADAPTERS)
    assert adapters.active is None
    for name in ["large", "principal", None, "small", "lengths", "large", None, "principal"]:
        adapters.activate(name)
        assert adapters.active == name
        expected = said(folders[name]) if name else logprobs_of(base, IDS)
        torch.testing.assert_close(logprobs_of(adapters.model, IDS), expected, rtol=0, atol=1e-4)
    assert fingerprint(named_weights(base)).combined != fingerprint(named_weights(adapters.model)).combined
    adapters.activate(None)
    assert fingerprint(named_weights(base)) == fingerprint(named_weights(adapters.model)), "the base is as it was"


ENDLESS = "(.*.*.*.*)*x_nowhere"
"""An expression that takes time exponential in a name's length."""


def spoil(folder: Path, **entries: object) -> AdapterTarget:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    found = find_adapter(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("targets", [ENDLESS, [f"re:{ENDLESS}"]])
def test_the_tensors_say_which_layers_have_adapters(folders: dict[str, Path], targets: object) -> None:
    found = spoil(folders["small"], target_modules=targets, exclude_modules=ENDLESS)
    adapters = empty_set()
    adapters.attach("small", folders["small"])
    adapters.activate("small")
    torch.testing.assert_close(logprobs_of(adapters.model, IDS), said(folders["small"]), rtol=0, atol=1e-4)
    del found.config["exclude_modules"]  # type: ignore[attr-defined]
    settings: Any = adapter_settings(found, NoAdapter())
    assert settings.targets == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    attach(plain("llama"), settings, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"r": 10**9}, "rank of 1000000000"),
        ({"r": "many"}, "rank of many"),
        ({"rank_pattern": {"q_proj": 10**9}}, "q_proj a rank of 1000000000"),
        ({"alpha_pattern": {"q_proj": "much"}}, "q_proj as much, not as a number above 0"),
        ({"rank_pattern": {ENDLESS: 4}}, "is not supported"),
        ({"modules_to_save": [ENDLESS]}, "is not supported"),
    ],
)
def test_a_config_that_takes_memory_or_time_without_end_is_refused(
    folders: dict[str, Path], entries: dict[str, object], says: str
) -> None:
    found = spoil(folders["small"], **entries)
    with pytest.raises(ModelError, match=says):
        empty_set().attach("small", folders["small"])
    with pytest.raises(ModelError, match=r"cannot be rebuilt from its settings: (r is|it uses)"):
        adapter_settings(found, NoAdapter())


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"use_dora": True, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}, "combined with dora"),
        ({"target_modules": 5}, "it names no target_modules"),
    ],
)
def test_settings_that_no_recipe_can_have_are_named(
    folders: dict[str, Path], entries: dict[str, object], says: str
) -> None:
    with pytest.raises(ModelError, match=f"cannot be rebuilt from its settings: .*{says}"):
        adapter_settings(spoil(folders["small"], **entries), NoAdapter())


def test_the_stream_has_the_active_adapter_alone(folders: dict[str, Path]) -> None:
    adapters = empty_set()
    for name, folder in folders.items():
        adapters.attach(name, folder)
    prints = set()
    for name in ADAPTERS:
        adapters.activate(name)
        names = [each for each, _ in named_weights(adapters.model)]
        assert len(names) == len(set(names))
        assert not any("@" in each for each in names)
        assert any("lora_magnitude_vector" in each for each in names) == (name == "lengths")
        prints.add(fingerprint(named_weights(adapters.model)).combined)
    assert len(prints) == len(ADAPTERS)


def test_an_engine_swaps_adapters_by_version(folders: dict[str, Path]) -> None:
    base: Any = twin(plain("llama"))
    adapters = AdapterSet(base, Base.of(base, "llama"))
    for name in ("small", "large"):
        adapters.attach(name, folders[name])
    engine = engine_over(adapters.model)
    for version, name in enumerate(["small", "large", "small"], 1):
        adapters.activate(name)
        engine.load(iter(()), version)
        torch.testing.assert_close(torch.tensor(engine.score([IDS])[0]), said(folders[name]), rtol=0, atol=1e-4)


def test_a_captured_engine_is_built_anew_for_each(folders: dict[str, Path]) -> None:
    """Decode steps on a GPU are laid out for one adapter: another must never be sampled with the old layout."""
    base: Any = twin(plain("llama"))
    adapters = AdapterSet(base, Base.of(base, "llama"))
    for name in ("small", "large"):
        adapters.attach(name, folders[name])
    for name in ("small", "large"):
        adapters.activate(name)
        engine = PagedEngine(adapters.model, slots=2, stop_ids=frozenset(), decode=str)
        engine.load(iter(()), 1)
        torch.testing.assert_close(torch.tensor(engine.score([IDS])[0]), said(folders[name]), rtol=0, atol=1e-4)
    adapters.activate("small")
    with pytest.raises(EngineError, match="the active adapter is @small, but the engine was built for @large"):
        engine.load(iter(()), 2)


def test_the_active_one_is_merged(folders: dict[str, Path]) -> None:
    adapters = empty_set()
    for name, folder in folders.items():
        adapters.attach(name, folder)
    for name in ADAPTERS:
        adapters.activate(name)
        own: nn.Module = plain("llama", seed=1)
        own.load_state_dict(dict(merged_weights(adapters.model)))
        torch.testing.assert_close(logprobs_of(own, IDS), said(folders[name]), rtol=0, atol=1e-4)


# --- what does not belong ---------------------------------------------------------------------------------------------
def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", Lora(rank=2), 0)
    other: Any = plain("llama", seed=1)
    with pytest.raises(
        ModelError, match=r"adapter was made for llama \(weights [0-9a-f]{16}\), but the base is mine"
    ) as caught:
        AdapterSet(other, Base.of(other, "mine")).attach("a", folder)
    assert caught.value.where == str(folder)


def test_a_foreign_folder_is_taken_with_a_warning(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", Lora(rank=2), 0)
    (folder / BASE).unlink()
    adapters = empty_set()
    assert adapters.attach("a", folder) == (
        f"warning: {folder} does not say which weights it was made for (it names llama); base is llama"
    )
    adapters.activate("a")
    torch.testing.assert_close(logprobs_of(adapters.model, IDS), said(folder), rtol=0, atol=1e-4)


def test_a_base_in_another_precision_cannot_be_compared(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", Lora(rank=2), 0)
    model: Any = plain("llama", dtype=torch.bfloat16)
    warning = AdapterSet(model, Base.of(model, "llama")).attach("a", folder)
    assert "made for llama in float32, base is llama in bfloat16" in warning


def test_a_foreign_folder_whose_base_was_changed_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", Lora(rank=2), 0)
    (folder / BASE).unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa_niter_4"}))
    with pytest.raises(ModelError, match=r"fits only a base that its initialisation \(pissa_niter_4\) had changed"):
        empty_set().attach("a", folder)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_a_folder_is_refused(tmp_path: Path, missing: str) -> None:
    folder = write(tmp_path / "a", Lora(rank=2), 0)
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=f"{missing} not found"):
        empty_set().attach("a", folder)


def test_other_shapes_names_and_methods_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", Lora(rank=2), 0)
    adapters = empty_set()
    adapters.attach("a", folder)
    with pytest.raises(ModelError, match="'a' is in use"):
        adapters.attach("a", folder)
    with pytest.raises(ModelError, match="in use, or not valid"):
        adapters.attach("a.b", folder)
    with pytest.raises(ModelError, match="no adapter is called 'b'"):
        adapters.activate("b")
    ia3 = write(tmp_path / "ia3", OtherPeft(method="ia3"), 0)
    with pytest.raises(ModelError, match="cannot be attached beside the others"):
        adapters.attach("ia3", ia3)
    shutil.copy(folder / "adapter_config.json", tmp_path / "ia3")
    with pytest.raises(ModelError, match="tensors do not fit the model"):
        empty_set().attach("b", tmp_path / "ia3")
