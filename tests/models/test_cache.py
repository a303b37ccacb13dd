from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lockstep.errors import ModelError
from lockstep.models.cache import MANIFEST, cache_root, cached_folder, sha256_of


def build(folder: Path) -> None:
    (folder / "a.txt").write_text("alpha")
    (folder / "b.txt").write_text("beta")


def test_root_is_the_variable_and_an_empty_one_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.setenv("LOCKSTEP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_root() == Path.home() / ".cache" / "lockstep"


def test_sha256_of_known_text(tmp_path: Path) -> None:
    (tmp_path / "abc").write_text("abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert sha256_of(tmp_path / "abc") == expected


def test_built_once_then_reused(tmp_path: Path) -> None:
    folder = cached_folder(tmp_path / "models" / "m", build)
    assert (folder / "a.txt").read_text() == "alpha"

    def fail(_: Path) -> None:
        raise AssertionError("built twice")

    assert cached_folder(folder, fail) == folder
    assert {path.name for path in folder.parent.iterdir()} <= {"m", "m.lock"}, "a temporary folder was left behind"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        build(folder)
        raise ModelError("the network went away")

    with pytest.raises(ModelError, match="network"):
        cached_folder(tmp_path / "m", half)
    assert not (tmp_path / "m").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"m.lock"}
    assert cached_folder(tmp_path / "m", build).is_dir()


def test_of_several_at_once_one_builds(tmp_path: Path) -> None:
    builds: list[Path] = []
    together = threading.Barrier(4)

    def slow(folder: Path) -> None:
        builds.append(folder)
        build(folder)

    def user() -> None:
        together.wait()
        cached_folder(tmp_path / "m", slow)

    threads = [threading.Thread(target=user) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "b.txt").write_text("bet!"), "b.txt"),  # same size, other bytes
        (lambda folder: (folder / "a.txt").write_text("alph"), "a.txt"),  # truncated
        (lambda folder: (folder / "a.txt").unlink(), "a.txt"),
        (lambda folder: (folder / MANIFEST).unlink(), MANIFEST),
        (lambda folder: (folder / MANIFEST).write_text("{"), MANIFEST),
        (lambda folder: (folder / MANIFEST).write_text("[]"), MANIFEST),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, named: str) -> None:
    folder = cached_folder(tmp_path / "m", build)
    damage(folder)
    with pytest.raises(ModelError, match=f"{named} has changed") as caught:
        cached_folder(folder, build)
    assert caught.value.where == str(folder)
