"""What doctor says of an environment that is broken; benchmarks/breakages.py breaks real ones."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from benchmarks import breakages
from lockstep.doctor.exercise import check_attention, check_builds, check_uvloop
from lockstep.doctor.imports import check_imports, check_model_cache, check_proxy, check_shadows, judge_import


def test_every_broken_import_is_named_not_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("raise ImportError('libfoo.so.1: cannot open shared object file')\n")
    (tmp_path / "crashing.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_imports(["json", "broken_one", "ast", "crashing", "not_there", "re"])
    assert [check.verdict for check in found] == ["fail"] * 3
    assert "broken_one cannot be imported: ImportError: libfoo.so.1" in found[0].found
    assert found[0].fix == f"{sys.executable} -m pip install --force-reinstall --no-deps broken_one"
    assert "crashing cannot be imported: its import ended the process (-11)" in found[1].found
    assert "No module named 'not_there'" in found[2].found
    assert [check.verdict for check in check_imports(["json", "ast"])] == ["ok"]


def test_the_variable_that_breaks_an_import_is_named() -> None:
    said = "ImportError: /opt/old/libstdc++.so.6: invalid ELF header"
    assert judge_import("numpy", said, {"LD_LIBRARY_PATH": "/a:/opt/old"}, "2.4.6").fix == "unset LD_LIBRARY_PATH"
    assert judge_import("numpy", said, {"LD_LIBRARY_PATH": ""}, "2.4.6").fix.endswith("--no-deps numpy==2.4.6")


def test_a_file_with_a_packages_name_is_found(tmp_path: Path) -> None:
    assert check_shadows(tmp_path, "").verdict == "ok"
    (tmp_path / "data").mkdir()
    (tmp_path / "torch").mkdir()  # no package: Python prefers the real one
    assert check_shadows(tmp_path, "").verdict == "ok"
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code/random.py").touch()
    check = check_shadows(tmp_path / "my code", "")
    assert check.fix == f"mv '{tmp_path}/my code/random.py' '{tmp_path}/my code/my_random.py'"
    assert check_shadows(tmp_path, f"/none:{tmp_path}/my code").fix == "unset PYTHONPATH"


def test_a_proxy_must_answer_and_leave_this_machine_alone() -> None:
    assert check_proxy({}).verdict == "ok"
    dead = check_proxy({"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"})
    assert (dead.verdict, dead.fix) == ("warn", "unset HTTPS_PROXY https_proxy")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        asks = check_proxy({"HTTPS_PROXY": address, "NO_PROXY": "corp.example"})
        assert (asks.verdict, asks.fix) == ("warn", "export NO_PROXY=corp.example,127.0.0.1,localhost")
        assert check_proxy({"HTTPS_PROXY": address, "NO_PROXY": "localhost,127.0.0.1"}).verdict == "ok"


def test_a_download_that_was_cut_off_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--it/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    )
    (snapshot / "one.safetensors").touch()
    check = check_model_cache()
    assert check.verdict == "warn"
    assert "org/it is incomplete: two.safetensors is missing" in check.found
    assert check.fix == f"rm -r {tmp_path}/models--org--it"
    (snapshot / "two.safetensors").touch()
    assert check_model_cache().verdict == "ok"


def test_kernels_are_tried() -> None:
    assert "on cpu: math" in check_attention("cpu").found
    assert check_uvloop().verdict in ("ok", "warn")
    if not Path("/dev/nvidia0").exists():
        assert check_attention("cuda").verdict == "fail"
        assert check_builds().verdict == "fail"


EASY = [case for case in breakages.CASES if not case.network and not case.root]


@pytest.mark.sampled("text is not UTF-8")
@pytest.mark.parametrize("case", EASY, ids=lambda case: case.name)
def test_a_broken_environment_is_named_and_its_fix_works_when_pasted(case: breakages.Case, tmp_path: Path) -> None:
    result = breakages.run(case, tmp_path)
    assert result.named, result.found
    assert result.mended, result.fix


def test_the_page_has_the_last_table() -> None:
    text, (begin, end) = breakages.PAGE.read_text(), breakages.MARKS
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    results = breakages.stored()
    assert shown == breakages.table(results)
    assert sum(one.named and one.mended for one in results) >= 15


def test_no_folder_of_a_machine_is_stored() -> None:
    said = (
        f"{breakages.SITE}/a and /b/env/lib/python3.12/site-packages/c; '/b/env/bin/python' /b/here/d {Path.home()}/e"
    )
    assert breakages.placeless(said) == "SITE/a and SITE/c; 'python' d ~/e"
    stored = breakages.RESULTS.read_text()
    assert [place for place in ("site-packages", "/tmp/", "/work/", "/home/", "/root/") if place in stored] == []
