"""Triton kernels without a GPU: Triton's interpreter runs them on the CPU, in a process of its own that is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def interpreted(check: Callable[..., None], *given: str, seconds: float = 600) -> None:
    """Run a function of a test file under the interpreter; what it asserts is asserted here."""
    mended = "from tests.interpreter import mend; mend()"
    seeded = "import torch; torch.manual_seed(0)"
    code = f"{mended}; from {check.__module__} import {check.__name__} as check; {seeded}; check(*{given!r})"
    root = Path(__file__).parents[1]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def mend() -> None:
    """Let it run with NumPy 2.4, and compute a row's product alike whatever the number of rows, as a GPU does.

    Its `int` is called on arrays of one element, which NumPy no longer takes. NumPy's fp32 products depend on the number of rows
    on some CPUs; sums in fp64 are rounded to the same fp32 number in any order.
    """
    import triton.runtime.interpreter as interpreter

    interpreter.int = _Int
    whole = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or any(one.data.dtype not in (np.float16, np.float32) for one in (a, b)):
            return whole(self, a, b, d, *options)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


class _Kind(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class _Int(metaclass=_Kind):
    """int() for the interpreter."""

    def __new__(cls, *args: Any) -> Any:
        return int(args[0].reshape(-1)[0]) if args and isinstance(args[0], np.ndarray) else int(*args)
