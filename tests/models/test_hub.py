"""Against a hub on this machine that speaks as much of the protocol as a download needs.

huggingface_hub reads its environment when it is imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hub as local
from tests.hub import COMMIT, Hub

SHOW = """
import sys
from lockstep.config.schema import Model
from lockstep.errors import ModelError
from lockstep.models import resolve
try:
    resolved = resolve(Model(path=sys.argv[1], revision=sys.argv[2] or None))
    print(resolved.source, resolved.revision, resolved.path)
except ModelError as error:
    print(error)
"""


@pytest.fixture
def hub(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub" / "org" / "tiny"
    (folder / "onnx").mkdir(parents=True)
    (folder.parent / "gated").mkdir()
    for path in tiny_model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for unwanted in ("pytorch_model.bin", "model.gguf", "modeling_own.py", "onnx/model.onnx", "onnx/config.json"):
        (folder / unwanted).write_text("never to be fetched")
    (folder.parent / "gated" / "config.json").write_text("{}")
    with local.serving(tmp_path / "hub", "models") as served:
        yield served


def ask(hub_url: str, home: Path, name: str, revision: str = "", *, offline: bool = False) -> str:
    """What resolving `name` prints in a fresh process: source, revision and path, or the error."""
    code, text = local.ask(hub_url, home, "-W", "ignore", "-c", SHOW, name, revision, offline=offline)
    assert code == 0, text
    return text


def test_a_model_is_fetched_without_what_is_not_needed_then_served_offline(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    source, revision, path = ask(hub.url, home, "org/tiny").split()
    assert (source, revision) == ("hub", COMMIT)
    assert Path(path).name == COMMIT
    wanted = {path.name for path in (hub.folder / "org" / "tiny").glob("*.json")} | {
        "model.safetensors",
        "chat_template.jinja",
    }
    assert set(hub.fetched) == wanted
    assert hub.fetched[-1] == "model.safetensors", "the weights come last"

    hub.fetched.clear()
    assert ask(hub.url, home, "org/tiny", offline=True).split()[1] == COMMIT
    assert ask("http://127.0.0.1:9", home, "org/tiny").split()[1] == COMMIT, "an unreachable hub is like offline"
    assert ask(hub.url, home, "org/tiny", "v1").split()[1] == COMMIT
    assert hub.fetched == []


def test_a_model_that_will_not_do_is_refused_before_its_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    file = hub.folder / "org" / "tiny" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert "quant_method: fp8" in ask(hub.url, tmp_path / "home", "org/tiny")
    assert "model.safetensors" not in hub.fetched


@pytest.mark.parametrize(
    ("name", "revision", "message", "fix"),
    [
        ("org/gated", "", "access to this model is gated", "/org/gated, then set HF_TOKEN"),
        ("org/missing", "", "the hub has no such model", "check the spelling"),
        ("org/tiny", "v9", "no revision 'v9'", "model.revision"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    hub: Hub, tmp_path: Path, name: str, revision: str, message: str, fix: str
) -> None:
    what, to_fix = ask(hub.url, tmp_path / "home", name, revision).splitlines()
    assert what.startswith(name)
    assert message in what
    assert fix in to_fix


def test_a_connection_that_breaks_off_is_explained(hub: Hub, tmp_path: Path) -> None:
    """The HTTP client raises an error of its own there, neither the hub's nor the system's."""
    hub.broken.add("model.safetensors")
    what, to_fix = ask(hub.url, tmp_path / "home", "org/tiny").splitlines()
    assert "the download failed: " in what
    assert "run the command again: the download continues where it stopped" in to_fix
    hub.broken.clear()
    assert ask(hub.url, tmp_path / "home", "org/tiny").split()[1] == COMMIT


def test_offline_and_not_cached_says_which_of_both_and_what_to_do(hub: Hub, tmp_path: Path) -> None:
    what, to_fix = ask(hub.url, tmp_path / "home", "org/tiny", offline=True).splitlines()
    assert "HF_HUB_OFFLINE is set" in what
    assert str(tmp_path / "home") in what
    assert "unset HF_HUB_OFFLINE" in to_fix
    what, to_fix = ask("http://127.0.0.1:9", tmp_path / "home", "org/tiny").splitlines()
    assert "cannot be reached" in what
    assert "check the network" in to_fix
