"""The process that reads an export back to verify it: plain transformers, with PEFT for an adapter, loads the folder.

    python -m lockstep.export.check REQUEST.json ANSWER.json

Of Lockstep it uses only the fingerprint and the codec: model, tokenizer and adapter are loaded as any other program loads them.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.codec import from_json, to_json


@dataclass(frozen=True, slots=True)
class Request:
    """Folder to load, and inputs to measure it with."""

    folder: str
    base: str
    """Folder of the model under an adapter; empty for a whole model."""
    dtype: str
    """Precision of the base in training: float32 or bfloat16."""
    device: str
    sequences: tuple[tuple[int, ...], ...]
    text: str
    """Text to tokenize."""
    chat: str
    """User message of a chat to render and tokenize; empty if the model has no template."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Measurements of a plain reader."""

    logprobs: tuple[tuple[float, ...], ...]
    """Log-probability of each token but the first, computed in fp32 with the weights as they are in the files."""
    parameters: int
    """Number of parameters without adapters; tied weights once."""
    tied: bool
    """True if the head's matrix is the embedding's."""
    fingerprint: str
    """Fingerprint of the model's weights (without adapters) after loading."""
    dtype: str
    complaints: tuple[str, ...]
    """Tensors that are missing, left over or of another shape."""
    ids: tuple[int, ...]
    chat_ids: tuple[int, ...]
    architecture: str


def answer(request: Request) -> Answer:
    """Load and measure."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from lockstep.models.weights import named_weights
    from lockstep.sync.fingerprint import fingerprint

    source = request.base or request.folder
    loader: Any = AutoModelForCausalLM
    dtype = getattr(torch, request.dtype) if request.base else "auto"
    model, report = loader.from_pretrained(source, dtype=dtype, output_loading_info=True, local_files_only=True)
    model = model.to(request.device).eval()
    complaints = [f"{kind}: {name}" for kind in sorted(report) for name in sorted(map(str, report[kind]))]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    said = AutoConfig.from_pretrained(source, local_files_only=True).get_text_config().tie_word_embeddings
    if bool(said) != tied:  # transformers looks at the values and ignores it; other engines trust the config
        complaints.append(f"config.json says tie_word_embeddings: {said}, the weights say {tied}")
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tied": tied,
        "fingerprint": fingerprint(named_weights(model)).combined,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "architecture": type(model).__name__,
    }
    if request.base:
        model, more = _with_adapter(model, request.folder)
        complaints += more
    tokenizer: Any = AutoTokenizer.from_pretrained(request.folder, local_files_only=True)
    return Answer(
        logprobs=_logprobs(model.float(), request.sequences),
        complaints=tuple(complaints),
        ids=tuple(tokenizer(request.text)["input_ids"]),
        chat_ids=tuple(rendered(tokenizer, request.chat)) if request.chat else (),
        **facts,
    )


def _with_adapter(model: Any, folder: str) -> tuple[Any, list[str]]:
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False).eval()
    told = [str(one.message) for one in caught if "adapter keys" in str(one.message)]
    # Buffers that a method computes from the base (DeLoRA's norms) are in no file; a missing parameter is a fault.
    return adapted, [
        f"PEFT misses {name}" for name, _ in adapted.named_parameters() if any(f"'{name}'" in t for t in told)
    ]


def _logprobs(model: Any, sequences: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
    import torch

    device = next(model.parameters()).device
    rows = []
    with torch.no_grad():
        for ids in sequences:
            ids_1T = torch.tensor([list(ids)], device=device)
            logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            rows.append(tuple(logprobs_TV.gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()))
    return tuple(rows)


def rendered(tokenizer: Any, chat: str) -> list[int]:
    """Return the ids of a chat with one user turn."""
    messages = [{"role": "user", "content": chat}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def main(request: Path, reply: Path) -> None:
    """Read a Request, write an Answer, both as JSON."""
    asked = from_json(Request, json.loads(request.read_text(encoding="utf-8")))
    reply.write_text(json.dumps(to_json(answer(asked))), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
