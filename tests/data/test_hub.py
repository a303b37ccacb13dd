"""Hub data sets, fetched by real processes from a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub import COMMIT, Hub, run, serving

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""


def put(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def gsm8k(name: str, count: int) -> list[dict[str, object]]:
    return [{"question": f"{name} {n} + 1?", "answer": f"Add.\n#### {n + 1}"} for n in range(count)]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    repo = folder / "openai" / "gsm8k"
    put(repo / "main" / "train-00000-of-00001.parquet", gsm8k("train", 7))
    put(repo / "main" / "test-00000-of-00001.parquet", gsm8k("test", 3))
    put(repo / "socratic" / "train-00000-of-00001.parquet", gsm8k("socratic", 2))
    (repo / "README.md").write_text(CARD)
    plain = folder / "org" / "plain" / "data"
    put(plain / "all.parquet", [{"prompt": f"{n}?", "answer": n} for n in range(4)])
    (folder / "org" / "plain" / ".gitattributes").write_text("")
    (folder / "org" / "gated").mkdir()
    (folder / "org" / "gated" / "README.md").write_text("")
    (folder / "org" / "gated" / "a.jsonl").write_text("{}")
    (folder / "org" / "script").mkdir()
    (folder / "org" / "script" / "script.py").write_text("")
    with serving(folder, "datasets") as served:
        yield served


def test_a_hub_id_is_fetched_then_served_offline(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    code, text = run(hub.url, home, "data", "check", "openai/gsm8k")
    assert code == 0, text
    assert f"openai/gsm8k@{COMMIT[:12]} main/train" in text
    assert "7 rows read, 0 bad, 7 kept" in text
    assert set(hub.fetched) == {"README.md", "main/train-00000-of-00001.parquet"}, "nothing but what is read"
    hub.fetched.clear()
    assert run(hub.url, home, "data", "check", "openai/gsm8k", offline=True) == (code, text)
    assert run("http://127.0.0.1:9", home, "data", "check", "gsm8k") == (code, text), (
        "a preset's name; a hub that is away"
    )
    assert hub.fetched == []


def test_subset_split_and_revision(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    _, text = run(hub.url, home, "data", "check", "openai/gsm8k", "split=test", "revision=v1")
    assert "3 rows read" in text
    _, text = run(hub.url, home, "data", "check", "openai/gsm8k", "subset=socratic")
    assert "2 rows read" in text
    code, text = run(hub.url, home, "data", "check", "openai/gsm8k", "split=tset")
    assert code == 4
    assert "there is no split 'tset'; did you mean test?" in text
    _, text = run(hub.url, home, "data", "check", "openai/gsm8k", "subset=mian")
    assert "there is no subset 'mian'; did you mean main?" in text
    _, text = run(hub.url, home, "data", "check", "openai/gsm8k", "revision=nowhere")
    assert "the hub has no revision 'nowhere' of this data set" in text


def test_an_hf_path(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    base = "hf://datasets/openai/gsm8k/main"
    code, text = run(hub.url, home, "data", "check", f"{base}/test-00000-of-00001.parquet", "preset=gsm8k")
    assert (code, "3 rows read" in text) == (0, True), text
    assert "10 rows read" in run(hub.url, home, "data", "check", base, "preset=gsm8k")[1], "a folder"
    assert (
        "9 rows read" in run(hub.url, home, "data", "check", "hf://datasets/openai/gsm8k/*/train-*", "preset=gsm8k")[1]
    )
    _, text = run(hub.url, home, "data", "check", f"{base}/test.parquet", "preset=gsm8k")
    assert "the data set has no file main/test.parquet" in text
    assert f"nearest: {base}/test-00000-of-00001.parquet" in text


def test_a_data_set_without_a_card_is_read_by_the_names_of_its_files(hub: Hub, tmp_path: Path) -> None:
    code, text = run(hub.url, tmp_path / "home", "data", "check", "org/plain")
    assert (code, "4 rows read" in text) == (0, True), text
    assert run(hub.url, tmp_path / "home", "data", "check", "org/plain", offline=True) == (code, text)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/nothing", "no file or folder of this name, and the hub has no such data set"),
        ("org/gated", "access to this data set is gated\n  to fix: accept the terms on http://127.0.0.1"),
        ("org/script", "the source has no file of type .parquet, .jsonl, .json or .csv"),
    ],
)
def test_what_cannot_be_had_says_why(hub: Hub, tmp_path: Path, source: str, said: str) -> None:
    code, text = run(hub.url, tmp_path / "home", "data", "check", source)
    assert code == 4
    assert said in text


def test_offline_and_not_cached(hub: Hub, tmp_path: Path) -> None:
    _, text = run(hub.url, tmp_path / "home", "data", "check", "org/plain", offline=True)
    assert "HF_HUB_OFFLINE is set, and the cache" in text
    _, text = run("http://127.0.0.1:9", tmp_path / "home", "data", "check", "org/plain")
    assert "the hub cannot be reached, and the cache" in text


def test_a_manifest_names_the_commit(hub: Hub, tmp_path: Path) -> None:
    code, text = run(hub.url, tmp_path / "home", "data", "build", "gsm8k", "--out", str(tmp_path / "out"))
    assert code == 0, text
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"][0]["commit"] == COMMIT
    assert manifest["sources"][0]["files"][0]["file"] == "main/train-00000-of-00001.parquet"
