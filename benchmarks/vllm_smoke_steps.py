"""How the sections of gpu_vllm_smoke.py tell what they find."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def result(section: str, step: str, ok: bool, **values: object) -> None:
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print("RESULT " + json.dumps({"section": section, "step": step, "ok": ok, **shown}), flush=True)


class Steps:
    """Runs steps one after the other; a step that fails is told with its traceback, and the next one runs."""

    def __init__(self, section: str) -> None:
        self.section = section

    @contextmanager
    def __call__(self, name: str) -> Iterator[dict[str, Any]]:
        values: dict[str, Any] = {}
        start = time.perf_counter()
        try:
            yield values
        except Exception as error:  # the whole point: one call shows all problems
            traceback.print_exc(file=sys.stdout)
            text = f"{type(error).__name__}: {str(error)[:600]}"
            result(self.section, name, False, seconds=time.perf_counter() - start, error=text, **values)
        else:
            result(self.section, name, True, seconds=time.perf_counter() - start, **values)
