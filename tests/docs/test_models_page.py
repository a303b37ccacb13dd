"""docs/models.md says of every family what is computed of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.models_page import HEAD, names, shown, tables

SOME = ["deepseek_v3", "gemma4_text", "gpt_oss", "llama", "mamba", "qwen3_5_text", "bert", "gpt2"]


def test_every_family_of_transformers_is_on_the_page_once() -> None:
    served, refused = shown()
    found = [line.split("|")[1].strip() for line in (served + refused).splitlines() if line.startswith("| ")]
    families = [name for name in found if name not in ("family", "---")]
    assert sorted(families) == names()
    assert len(served.splitlines()) - len(HEAD.splitlines()) >= 90


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", SOME)
def test_a_family_is_on_the_page_as_it_is_computed(family: str) -> None:
    page, computed = shown(), tables([family])
    (line,) = [line for text in computed for line in text.splitlines() if line.startswith(f"| {family} |")]
    assert line in (page[0] + page[1]).splitlines()


@pytest.mark.slow
def test_the_page_is_what_is_computed() -> None:
    """In a process of its own: what other tests import changes what transformers does with some families."""
    code = "\n".join(
        (
            "import json, torch; torch.set_num_threads(1)",
            "from tests.docs.models_page import names, tables; print(json.dumps(tables(names())))",
        )
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    computed = json.loads(done.stdout.splitlines()[-1])
    for here, there in zip(shown(), computed, strict=True):
        assert set(here.splitlines()) ^ set(there.splitlines()) == set()
