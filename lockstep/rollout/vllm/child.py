"""The process of a vLLM engine: `python -m lockstep.rollout.vllm.child SETTINGS DESCRIPTOR`, started by process.py."""

from __future__ import annotations

import json
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep import codec
from lockstep.rollout.requests import Decode
from lockstep.rollout.vllm.serve import serve
from lockstep.rollout.vllm.settings import VllmSettings
from lockstep.rollout.vllm.wire import Channel
from lockstep.types import RolloutEngine


def main() -> None:
    started = time.time()
    settings = codec.from_json(VllmSettings, json.loads(sys.argv[1]))

    def build() -> RolloutEngine:
        from lockstep.rollout.vllm.engine import VllmEngine

        return VllmEngine(settings, _decode_of(settings))

    serve(Channel.inherited(int(sys.argv[2])), build, started)


def _decode_of(settings: VllmSettings) -> Decode:
    """Return the tokenizer's decode; it is loaded only for a request with stop strings."""

    @lru_cache(maxsize=1)
    def tokenizer() -> Any:
        from lockstep.models import load_tokenizer
        from lockstep.models.resolve import ResolvedModel, Source

        folder = Path(settings.folder)
        return load_tokenizer(ResolvedModel(folder, str(folder), Source.FOLDER, None, settings.trust_remote_code))

    return lambda ids: str(tokenizer().decode(ids))


if __name__ == "__main__":
    main()
