"""Writes checkpoints of known content. As a program: saves step after step in a run directory until it is killed."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from lockstep.checkpoint.store import save


def block(step: int, index: int, size: int = 200_000) -> bytes:
    """A safetensors file of one byte tensor whose content depends on the step and the index."""
    data = bytes((step * 31 + index * 7 + place) % 251 for place in range(251)) * (size // 251)
    header = json.dumps({"t": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def write(folder: Path, step: int, files: int = 6, size: int = 200_000) -> None:
    for index in range(files):
        (folder / f"part_{index}.safetensors").write_bytes(block(step, index, size))
    (folder / "config.json").write_text(json.dumps({"step": step}))


def saved(run_dir: Path, step: int, files: int = 3, size: int = 2_000, overwrite: bool = False) -> Path:
    writer = partial(write, step=step, files=files, size=size)
    return save(run_dir, step, writer, {"version": step}, overwrite=overwrite)


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def main() -> None:
    run_dir, first = Path(sys.argv[1]), int(sys.argv[2])
    for step in range(first, first + 10_000):
        saved(run_dir, step, files=6, size=200_000)
        print(step, flush=True)


if __name__ == "__main__":
    main()
