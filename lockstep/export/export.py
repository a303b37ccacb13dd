"""`lockstep export`: a trained checkpoint as a folder for other programs, verified before it gets its name."""

from __future__ import annotations

import gc
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.build.build import build_policy
from lockstep.build.parts import Policy
from lockstep.build.warm_start import base_of, find_parent
from lockstep.checkpoint.manifest import COMMIT
from lockstep.checkpoint.store import list_checkpoints
from lockstep.config.adapter import Lora
from lockstep.errors import ConfigError, ExportError
from lockstep.export.as_gguf import into_gguf
from lockstep.export.card import Source, model_card, source_of
from lockstep.export.check import Request
from lockstep.export.files import copy_model_files, in_the_making, new_folder
from lockstep.export.measure import TEXT, is_tied, probe_sequences, rounding_noise, wide_logprobs
from lockstep.export.shards import SHARD_BYTES, tensor_names, write_sharded
from lockstep.export.verify import Check, Expected, Verified, in_fresh_process, verify
from lockstep.learner.adapter_files import CONFIG, TENSORS, save_adapter
from lockstep.learner.adapter_start import has_residual_base
from lockstep.learner.adapters import facts_of
from lockstep.learner.learner import base_model
from lockstep.learner.merge import merged_weights
from lockstep.models import load_model, resolve, resolve_dtype
from lockstep.models.attention import NAME as ATTENTION
from lockstep.models.resolve import Source as From
from lockstep.models.weights import load_weights, named_weights
from lockstep.scoring.targets import Target, read_adapter_folder, read_checkpoint
from lockstep.sync.fingerprint import fingerprint

RECORD = "lockstep_export.json"
ROUNDED = "bfloat16"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    kind: Literal["model", "adapter", "gguf"]
    dtype: str
    bytes: int
    fingerprint: str
    """Of the weights in the files (for gguf, of the folder that it was made of); of an adapter's folder that of its base."""
    verified: Verified
    config_changes: tuple[str, ...]
    source: Source


@dataclass(frozen=True, slots=True)
class _Written:
    expected: Expected
    request: Request
    bytes: int
    config_changes: list[str]


def choice_note(name: str, step: int | None) -> str:
    """A line that says which checkpoint of several is taken when none was named; "" where there is no choice."""
    path = Path(name)
    if step is not None or not (path / "manifest.json").is_file() or (path / COMMIT).is_file():
        return ""
    steps = [info.step for info in list_checkpoints(path) if info.complete]
    if len(steps) < 2:
        return ""
    shown = ", ".join(map(str, steps))
    return f"{name} has checkpoints of steps {shown}: the newest, {steps[-1]}, is exported (--step N takes another)"


def export(
    target: Target,
    out: Path,
    *,
    adapter: bool = False,
    gguf: bool = False,
    shard_bytes: int = SHARD_BYTES,
    check: Check = in_fresh_process,
) -> Exported:
    """Write `target` to the new folder `out`: a plain model, with `adapter` PEFT's layout, or with `gguf` one file for llama.cpp.

    Everything is written beside `out`, read back by `check`, and renamed when it was found to be the model that trained. Raises
    ExportError, and leaves nothing, if it is not; ModelError if GGUF cannot say it.
    """
    _refuse(target, adapter=adapter)
    out = new_folder(out)
    with in_the_making(out) as folder, tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as back:
        written = _write(target, folder, adapter=adapter, shard_bytes=shard_bytes)
        written = replace(written, expected=_with_base(written.expected, target, written.request))
        _free()
        expected, request = written.expected, written.request
        if gguf:
            expected, request = into_gguf(folder, Path(back), expected, request)
        found = check(request)
        verified = verify(expected, found, tensor_names(Path(request.folder)), str(out))
        source = source_of(target, found.architecture)
        exported = Exported(
            out, "gguf" if gguf else "adapter" if adapter else "model", written.expected.dtype, written.bytes,
            written.expected.fingerprint, verified, () if gguf else tuple(written.config_changes), source,
        )  # fmt: skip
        (folder / RECORD).write_text(_record(exported), encoding="utf-8")
        (folder / "README.md").write_text(model_card(target, source, verified, exported.kind, exported.dtype), "utf-8")
    return exported


def _refuse(target: Target, *, adapter: bool) -> None:
    settings = target.recipe.adapter
    if not adapter:
        return
    if settings.kind == "none":
        raise ConfigError([f"--adapter: {target.label} has no adapter: all weights were trained"], fix="leave it out")
    if base := base_of(find_parent(target.recipe)):
        raise ConfigError(
            [f"--adapter: the base of {target.label} is what {base.run or base.info.path} trained, no published model"],
            fix="export it merged (--merge)",
        )
    if isinstance(settings, Lora) and settings.base == "nf4":
        raise ConfigError(
            [f"--adapter: {target.label} was trained over a base in 4 bits"], fix="export it merged (--merge)"
        )


# --- writing --------------------------------------------------------------------------------------------------------
def _write(target: Target, folder: Path, *, adapter: bool, shard_bytes: int) -> _Written:
    """Files, and what the trained model is; the model is gone when this returns."""
    policy = _trained(target)
    model, source = policy.model, policy.resolved.path
    dtype = "bfloat16" if policy.numerics == "bf16" else "float32"
    own_code = policy.resolved.trust_remote_code
    changes = copy_model_files(source, folder, dtype, whole=not adapter, own_code=own_code)
    if adapter:
        identity, total = _write_adapter(policy, target, folder)
    else:
        identity, total = _write_model(model, folder, shard_bytes)
    sequences = probe_sequences(model, policy.tokenizer.all_special_ids)
    device = str(next(model.parameters()).device)
    trained = wide_logprobs(model, sequences)
    exact = target.recipe.adapter.kind == "none" or (adapter and not has_residual_base(model))
    rounded = dtype == ROUNDED and not exact
    noise = rounding_noise(model, sequences) if rounded else None
    tokenizer: Any = policy.tokenizer
    chat = TEXT if getattr(tokenizer, "chat_template", None) else ""
    expected = Expected(
        trained, (), noise, 0, False, frozenset(), identity, dtype,
        tuple(tokenizer(TEXT)["input_ids"]), tuple(_rendered(tokenizer, chat)) if chat else (),
    )  # fmt: skip
    request = Request(str(folder), str(source) if adapter else "", dtype, device, sequences, TEXT, chat)
    return _Written(expected, request, total, changes)


def _write_model(model: nn.Module, folder: Path, shard_bytes: int) -> tuple[str, int]:
    """Fingerprint and bytes of the merged weights."""
    merged = dict(merged_weights(model))
    identity = fingerprint(iter(merged.items())).combined
    return identity, write_sharded(folder, _published(base_model(model), merged).items(), shard_bytes)


def _trained(target: Target) -> Policy:
    """The model with the target's weights in place, proven to be those that were saved."""
    policy = build_policy(target.recipe, replaced=target.whole)
    if target.checkpoint is not None:
        saved = read_checkpoint(policy, target.checkpoint)
    elif target.adapter is not None:
        saved = read_adapter_folder(policy, target.adapter)
    else:
        return policy
    load_weights(policy.model, iter(saved.weights.items()))
    found = fingerprint(named_weights(policy.model)).combined
    if found != saved.fingerprint:
        raise ExportError(f"in memory are weights {found}, saved were {saved.fingerprint}", where=target.label)
    return policy


def _published(plain: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the family's published checkpoints name and shape them: transformers joins experts when it loads."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(plain, weights))


def _write_adapter(policy: Policy, target: Target, folder: Path) -> tuple[str, int]:
    """Fingerprint of the base, bytes of the adapter."""
    facts = facts_of(policy.model)
    assert facts is not None
    save_adapter(folder, policy.model, target.recipe.adapter, facts.base)
    if policy.resolved.source is From.BUILTIN:  # PEFT finds a folder, not our name
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = str(policy.resolved.path)
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    (folder / TENSORS).chmod(0o644)  # safetensors makes files for their owner alone
    return facts.base.fingerprint, sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _with_base(expected: Expected, target: Target, request: Request) -> Expected:
    """What the model that the recipe names says, loaded anew: names, size and tying of weights, and its log-probabilities."""
    resolved = resolve(target.recipe.model)
    dtype = resolve_dtype("bf16" if request.dtype == ROUNDED else "fp32", request.device)
    base: nn.Module = load_model(resolved, dtype=dtype, device=request.device, attention=ATTENTION)
    weights = dict(named_weights(base))
    return replace(
        expected,
        names=frozenset() if request.base else frozenset(_published(base, weights)),
        parameters=sum(parameter.numel() for parameter in base.parameters()),
        tied=is_tied(base),
        base=wide_logprobs(base, request.sequences),
    )


def _rendered(tokenizer: Any, chat: str) -> list[int]:
    messages = [{"role": "user", "content": chat}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _record(exported: Exported) -> str:
    facts = asdict(exported) | {"path": str(exported.path), "equals_base": exported.verified.equals_base}
    return json.dumps(facts, indent=2) + "\n"
