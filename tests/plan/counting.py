"""Counting memory on a CPU: bytes of all live tensors, now and at their worst."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made inside and still alive, and the largest they ever were. Rounds to 512 bytes as CUDA does."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """`known` tensors were made outside: views of them are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = -(-storage.nbytes() // 512) * 512

        def freed(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
