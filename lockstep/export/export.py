"""`lockstep export`: writes a trained checkpoint as a folder for other programs, which gets its name once it is verified."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from lockstep.build.build import build_policy
from lockstep.build.parts import Policy
from lockstep.build.warm_start import base_of, find_parent
from lockstep.checkpoint.manifest import COMMIT
from lockstep.checkpoint.store import list_checkpoints
from lockstep.codec import from_json
from lockstep.config.adapter import Lora
from lockstep.device import free_memory
from lockstep.errors import DEFECT, ConfigError, ExportError
from lockstep.export.cache import RECORD, Place, hashes, look, made_of, making_alone
from lockstep.export.card import Source, model_card, name_of, source_of
from lockstep.export.check import Request, rendered
from lockstep.export.files import SHARD_BYTES, copy_model_files, in_the_making, tensor_names, write_sharded
from lockstep.export.measure import TEXT, is_tied, probe_sequences, rounding_noise, wide_logprobs
from lockstep.export.verify import Check, Expected, Verified, in_fresh_process, verify
from lockstep.learner.adapter_files import CONFIG, TENSORS, save_adapter
from lockstep.learner.adapter_start import has_residual_base
from lockstep.learner.adapters import facts_of
from lockstep.learner.learner import base_model
from lockstep.learner.merge import merged_weights
from lockstep.models import load_model, resolve, resolve_dtype
from lockstep.models.attention import NAME as ATTENTION
from lockstep.models.convert import convert_gguf
from lockstep.models.folder import read_json
from lockstep.models.gguf_writer import folder_tensors, write_gguf
from lockstep.models.merged_weights import merged_of, separate
from lockstep.models.resolve import Source as From
from lockstep.models.weights import load_weights, named_weights
from lockstep.scoring.targets import Target, read_adapter_folder, read_checkpoint
from lockstep.sync.fingerprint import fingerprint
from lockstep.track.files import write_atomic

GGUF_FILE = "model.gguf"
CARD = "README.md"
Kind: TypeAlias = Literal["model", "adapter", "gguf"]
BOUNDARIES = ("bos_token", "eos_token", "pad_token")
ROUNDED = "bfloat16"


@dataclass(frozen=True, slots=True)
class Exported:
    """Facts of a finished export."""

    path: Path
    kind: Kind
    dtype: str
    bytes: int
    fingerprint: str
    """Fingerprint of the weights in the files; for gguf of the folder it was made from, for an adapter of its base."""
    verified: Verified
    config_changes: tuple[str, ...]
    source: Source
    reused: bool = False
    """It was there already."""


@dataclass(frozen=True, slots=True)
class _Written:
    expected: Expected
    request: Request
    bytes: int
    config_changes: list[str]


def choice_note(name: str, step: int | None) -> str:
    """Return a line that says which checkpoint of several is taken when none was named; "" where there is no choice."""
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
    out: Path | None,
    *,
    adapter: bool = False,
    gguf: bool = False,
    shard_bytes: int = SHARD_BYTES,
    again: bool = False,
    check: Check = in_fresh_process,
) -> Exported:
    """Write `target` to the new folder `out`: a plain model, with `adapter` PEFT's layout, or with `gguf` one file for llama.cpp.

    Everything is written beside `out`, read back by `check`, and renamed once it is proven to be the model that trained. Raises
    ExportError, and leaves nothing, if it is not; ModelError if GGUF cannot express it. Without `out` the place is in the cache.
    An export of the same weights and settings, every file whole, is not made again, unless with `again`.
    """
    _refuse(target, adapter=adapter)
    kind: Kind = "gguf" if gguf else "adapter" if adapter else "model"
    key = made_of(target, kind, shard_bytes)
    with making_alone(key) if out is None else nullcontext():
        place = look(out, key, again=again)
        if place.record is not None:
            return _reused(target, kind, place.path, place.record)
        return _make(target, place, kind, key, shard_bytes, check)


def _make(target: Target, place: Place, kind: Kind, key: dict[str, Any], shard_bytes: int, check: Check) -> Exported:
    out, adapter = place.path, kind == "adapter"
    with (
        in_the_making(out, replaced=place.replaced) as folder,
        tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as back,
    ):
        written = _write(target, folder, adapter=adapter, shard_bytes=shard_bytes)
        written = replace(written, expected=_with_base(written.expected, target, written.request))
        free_memory()
        expected, request = written.expected, written.request
        if kind == "gguf":
            expected, request = into_gguf(folder, Path(back), expected, request, name_of(target))
        found = check(request)
        verified = verify(expected, found, tensor_names(Path(request.folder)), str(out))
        source = source_of(target, found.architecture)
        exported = Exported(
            out, kind, written.expected.dtype, written.bytes,
            written.expected.fingerprint, verified, () if kind == "gguf" else tuple(written.config_changes), source,
        )  # fmt: skip
        (folder / CARD).write_text(model_card(target, source, verified, kind, exported.dtype), "utf-8")
        facts = asdict(exported) | {"path": str(out), "equals_base": verified.equals_base, "made_of": key}
        del facts["reused"]
        _write_record(folder, facts)
    return exported


def _write_record(folder: Path, facts: dict[str, Any]) -> None:
    write_atomic(folder / RECORD, json.dumps(facts | {"files": hashes(folder)}, indent=2) + "\n")


def _reused(target: Target, kind: Kind, folder: Path, record: dict[str, Any]) -> Exported:
    """Return the export that is there, its card brought up to date."""
    found = Exported(
        folder, kind, record["dtype"], record["bytes"], record["fingerprint"], from_json(Verified, record["verified"]),
        tuple(record["config_changes"]), from_json(Source, record["source"]), reused=True,
    )  # fmt: skip
    card = model_card(target, found.source, found.verified, kind, found.dtype)
    if card != (folder / CARD).read_text("utf-8"):
        write_atomic(folder / CARD, card)
        _write_record(folder, record)
    return found


def _refuse(target: Target, *, adapter: bool) -> None:
    settings = target.recipe.adapter
    if not adapter:
        return
    if settings.kind == "none":
        raise ConfigError(
            [f"--adapter cannot be used: {target.label} has no adapter, all its weights were trained"],
            fix="leave --adapter out",
        )
    if base := base_of(find_parent(target.recipe)):
        raise ConfigError(
            [
                f"--adapter cannot be used: {target.label} has a base that is no published model, but of "
                f"{base.run or base.info.path}"
            ],
            fix="export the merged model: --merge",
        )
    if isinstance(settings, Lora) and settings.base == "nf4":
        raise ConfigError(
            [f"--adapter cannot be used: {target.label} was trained over a base in 4 bits"],
            fix="export the merged model: --merge",
        )


# --- writing --------------------------------------------------------------------------------------------------------
def _write(target: Target, folder: Path, *, adapter: bool, shard_bytes: int) -> _Written:
    """Write the files and measure the trained model, which is freed on return."""
    policy = _trained(target)
    model, source = policy.model, policy.resolved.path
    dtype = "bfloat16" if policy.numerics == "bf16" else "float32"
    own_code = policy.resolved.trust_remote_code
    changes = copy_model_files(source, folder, dtype, whole=not adapter, own_code=own_code)
    if adapter:
        identity, total = _write_adapter(policy, target, folder)
    else:
        merged = dict(merged_weights(model))
        identity = fingerprint(iter(merged.items())).combined
        total = write_sharded(folder, _published(base_model(model), merged), shard_bytes)
        del merged
    sequences = probe_sequences(model, policy.tokenizer.all_special_ids)
    device = str(next(model.parameters()).device)
    as_trained = bool(merged_of(model)) and not adapter
    if adapter:
        separate(model)  # as PEFT computes
    trained = wide_logprobs(model, sequences)
    exact = target.recipe.adapter.kind == "none" or as_trained or (adapter and not has_residual_base(model))
    rounded = dtype == ROUNDED and not exact
    noise = rounding_noise(model, sequences) if rounded else None
    tokenizer: Any = policy.tokenizer
    chat = TEXT if getattr(tokenizer, "chat_template", None) else ""
    expected = Expected(
        trained, (), noise, 0, False, frozenset(), identity, dtype,
        tuple(tokenizer(TEXT)["input_ids"]), tuple(rendered(tokenizer, chat)) if chat else (),
    )  # fmt: skip
    request = Request(str(folder), str(source) if adapter else "", dtype, device, sequences, TEXT, chat)
    return _Written(expected, request, total, changes)


def _trained(target: Target) -> Policy:
    """Build the policy with the target's weights in place, proven to be those that were saved."""
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
        raise ExportError(
            f"the weights in memory are not the saved ones: fingerprint {found} instead of {saved.fingerprint}",
            where=target.label,
            fix=DEFECT,
        )
    return policy


def _published(plain: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as the family's published checkpoints name and shape them: transformers joins experts on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(plain, weights))


def _write_adapter(policy: Policy, target: Target, folder: Path) -> tuple[str, int]:
    """Write the adapter; returns the base's fingerprint and the adapter's bytes."""
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
    """Add facts of the recipe's own model, loaded again: names, size and tying of weights, and its log-probabilities."""
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


# --- GGUF -----------------------------------------------------------------------------------------------------------
def into_gguf(folder: Path, back: Path, expected: Expected, request: Request, name: str) -> tuple[Expected, Request]:
    """Replace the model in `folder` by GGUF_FILE; the empty `back` becomes the plain fp32 model that our reader makes from it.

    Returns the facts that `back` must have, and the request that measures it. Raises ModelError for a model or tokenizer that
    the format cannot express, ExportError if a special token did not come back.
    """
    wide = fingerprint((name, tensor.float()) for name, tensor in folder_tensors(folder)).combined
    write_gguf(folder, folder / GGUF_FILE, name)
    convert_gguf(folder / GGUF_FILE, back)
    _require_boundaries(folder, back)
    for path in folder.iterdir():
        if path.name != GGUF_FILE:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return replace(expected, dtype="float32", fingerprint=wide), replace(request, folder=str(back))


def _require_boundaries(folder: Path, back: Path) -> None:
    texts = [read_json(place / "tokenizer_config.json") for place in (folder, back)]
    wrong = []
    for name in BOUNDARIES:
        tokens = [text.get(name) for text in texts]
        before, after = (token.get("content") if isinstance(token, dict) else token for token in tokens)
        wrong += [f"{name}: {after} instead of {before}"] if before != after else []
    if wrong:
        raise ExportError(
            f"the GGUF file lost special tokens: {'; '.join(wrong)}", where=str(folder), fix="export with --format hf"
        )
