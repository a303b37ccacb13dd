"""An export is the model that trained, as plain readers see it; a wrong one is refused and leaves nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import lockstep.export.export as module
from lockstep.cli import main
from lockstep.errors import ConfigError, ExportError, RunDirectoryError
from lockstep.evaluation.records import read_score
from lockstep.export import check
from lockstep.export.export import Exported, choice_note, export
from lockstep.export.measure import spacing
from lockstep.export.verify import EXACT, in_fresh_process
from lockstep.learner.merge import merged_weights
from lockstep.scoring.targets import find_target
from lockstep.tasks.build import build_task
from lockstep.track.rundir import RunDirectory
from tests.loops import sft_runs
from tests.loops.runs import LORA, NO_EVAL, trained
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
SHORT = ("steps=2", "save.keep_last=2")


@pytest.fixture(scope="module")
def untied(home: Path) -> Path:
    (home / "untied").mkdir()
    write_tiny_model(home / "untied", tied=False)
    return home / "untied"


@pytest.fixture(scope="module")
def lora(home: Path, model: Path) -> RunDirectory:
    return trained(home, model, *LORA, *SHORT, "name=lora")


@pytest.fixture(scope="module")
def full(home: Path, untied: Path) -> RunDirectory:
    return trained(home, untied, *SHORT, NO_EVAL, "name=full")


@pytest.fixture(scope="module")
def narrow(home: Path, model: Path) -> RunDirectory:
    return trained(home, model, *LORA, *SHORT, NO_EVAL, "name=narrow", "model.dtype=bf16", "optimizer.lr=0.05")


def exported(run: RunDirectory, out: Path, *, step: int = 2, adapter: bool = False, shard: int = 10**9) -> Exported:
    target = find_target(str(run.path), step=step)
    return export(target, out, adapter=adapter, shard_bytes=shard, check=check.answer)


def test_a_folder_here_is_no_base_on_the_hub(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_dir, "my/model")
    run = trained(tmp_path, Path("my/model"), NO_EVAL, "steps=1")
    exported(run, tmp_path / "out", step=1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- **Base**: my/model" in card
    assert "base_model" not in card


def test_a_merged_run_in_a_fresh_process(lora: RunDirectory, model: Path, tmp_path: Path) -> None:
    done = export(find_target(str(lora.path), step=2), tmp_path / "out", check=in_fresh_process)
    verified = done.verified
    assert verified.trained.max <= EXACT
    assert verified.base.mean > 1e-3
    assert not verified.equals_base
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert (verified.parameters, verified.tied) == (sum(p.numel() for p in plain.parameters()), True)
    own, base = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", model))
    assert {**base, "dtype": "float32"} == own
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_card_has_scores_numerics_lineage_and_formula(lora: RunDirectory, tmp_path: Path) -> None:
    exported(lora, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    info = find_target(str(lora.path), step=2).checkpoint
    assert info is not None
    assert f"weights {info.meta['fingerprint']}" in card
    assert "LoRA rank 4" in card
    assert "fp32 (training); the files hold float32" in card
    assert "| base | this model |" in card
    assert card.count("| greedy |") == 1
    assert lora.manifest()["formula"] in card
    record = json.loads((tmp_path / "out" / "lockstep_export.json").read_text())
    assert record["source"]["step"] == 2
    assert record["verified"]["trained"]["max"] <= EXACT


@pytest.mark.slow
def test_an_adapter_for_peft(lora: RunDirectory, model: Path, tmp_path: Path) -> None:
    done = export(find_target(str(lora.path), step=2), tmp_path / "out", adapter=True, check=in_fresh_process)
    assert done.verified.trained.max <= EXACT
    assert done.verified.base.mean > 1e-3
    assert not (tmp_path / "out" / "config.json").exists()
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_shards_by_size(full: RunDirectory, tmp_path: Path) -> None:
    exported(full, tmp_path / "out", shard=200_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert all((tmp_path / "out" / name).stat().st_size < 205_000 for name in files)


def test_a_rounded_merge_is_judged_by_measured_noise(narrow: RunDirectory, tmp_path: Path) -> None:
    done = exported(narrow, tmp_path / "out")
    verified = done.verified
    assert done.dtype == "bfloat16"
    assert EXACT < verified.tolerance.mean < 0.1
    assert 0 < verified.trained.mean <= verified.tolerance.mean
    assert verified.base.mean > 3 * verified.tolerance.mean
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("adapter", [False, True])
def test_weights_that_were_trained_merged_are_exported_without_a_rounding(
    adapter: bool, home: Path, model: Path, tmp_path: Path
) -> None:
    settings = (
        *LORA,
        *SHORT,
        NO_EVAL,
        f"name=merged-{adapter}",
        "model.dtype=bf16",
        "optimizer.lr=0.05",
        "adapter.merged=true",
    )
    verified = exported(trained(home, model, *settings), tmp_path / "out", adapter=adapter).verified
    assert verified.tolerance.max == EXACT >= verified.trained.max
    assert verified.base.mean > 100 * verified.trained.mean


def test_the_spacing_of_bf16() -> None:
    weights = torch.tensor([1.0, -1.5, 0.3, 100.0], dtype=torch.bfloat16)
    above = (weights.view(torch.int16) + 1).view(torch.bfloat16)
    assert torch.equal(spacing(weights.float()), (above.float() - weights.float()).abs())


def test_the_documented_task_of_lm_eval_reads_a_boxed_answer() -> None:
    """lm-eval is no dependency: this is the part of docs/examples/boxed_sums.yaml that can be wrong without it."""
    task = yaml.safe_load((ROOT / "docs" / "examples" / "boxed_sums.yaml").read_text())
    (reads, _), *_ = [one["filter"] for one in task["filter_list"]]
    assert re.findall(reads["regex_pattern"], "so \\boxed{ -16 } it is") == ["-16"]
    recipe = yaml.safe_load((ROOT / "recipes" / "sft_boxed.yaml").read_text())
    assert task["doc_to_text"] == "{{question}}" + recipe["chat"]["suffix"]
    assert task["generation_kwargs"]["max_gen_toks"] == recipe["rollout"]["max_tokens"]
    assert f"--tasks {task['task']} " in (ROOT / "docs" / "export.md").read_text()


@pytest.mark.parametrize("parent", [{"run": "x"}, [], "runs/x"])
def test_a_lineage_that_was_tampered_with(parent: object, lora: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(lora.path, tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parent": parent}))
    with pytest.raises(RunDirectoryError, match="is not a manifest of Lockstep: parent"):
        exported(RunDirectory.open(tmp_path / "run"), tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_shard_of_no_size(size: str, lora: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(lora.path), str(tmp_path / "out"), "--step", "2", f"--shard-gb={size}"]) == 2
    assert "is not a file size" in capsys.readouterr().err


def test_an_adapter_is_not_rounded(narrow: RunDirectory, tmp_path: Path) -> None:
    verified = exported(narrow, tmp_path / "out", adapter=True).verified
    assert verified.tolerance.max == EXACT >= verified.trained.max


def test_no_record_of_another_folder_is_taken_along(home: Path, model: Path, tmp_path: Path) -> None:
    """A run is known by its manifest.json: an export that had one would be taken for a run."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").write_text("{}")
    run = trained(tmp_path, tmp_path / "model", NO_EVAL, "steps=1")
    exported(run, tmp_path / "out", step=1)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (run.checkpoints_path / "step_000001" / "manifest.json").exists()
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_untrained_weights_equal_the_base(lora: RunDirectory, tmp_path: Path) -> None:
    done = exported(lora, tmp_path / "out", step=0)
    assert done.verified.equals_base
    assert "EQUALS THE BASE" in (tmp_path / "out" / "README.md").read_text()


def test_sft_and_its_heir(home: Path, model: Path, tmp_path: Path) -> None:
    """Adapters over a base that another run trained are merged into that base; the card names both."""
    first = sft_runs.trained(home, model, "name=sft", "eval.enabled=false")
    heir = trained(home, model, *LORA, *SHORT, NO_EVAL, "name=heir", f"warm_start={first.path}")
    exported(first, tmp_path / "sft", step=4)
    exported(heir, tmp_path / "heir")
    assert "loop sft" in (tmp_path / "sft" / "README.md").read_text()
    assert f"**Started from**: {first.path}" in (tmp_path / "heir" / "README.md").read_text()
    with pytest.raises(ConfigError, match="no published model"):
        exported(heir, tmp_path / "adapter", adapter=True)


def test_adapters_that_went_on_are_still_for_the_published_base(
    home: Path, model: Path, lora: RunDirectory, tmp_path: Path
) -> None:
    """A warm start from adapters trains these same adapters: what they are over is the model that the recipe names."""
    heir = trained(home, model, *LORA, *SHORT, "name=further", f"warm_start={lora.path}")
    done = exported(heir, tmp_path / "out", adapter=True)
    assert done.verified.trained.max <= EXACT
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| start | this model |" in card  # its step 0 is what the other run trained, not the base
    over_trained = trained(home, model, *LORA, *SHORT, NO_EVAL, "name=third", f"warm_start={heir.path}")
    assert exported(over_trained, tmp_path / "third", adapter=True).verified.trained.max <= EXACT


def test_the_card_of_an_adapter_serves_its_rank(home: Path, model: Path, tmp_path: Path) -> None:
    run = trained(home, model, *LORA, NO_EVAL, "name=wide", "steps=1", "adapter.rank=24")
    exported(run, tmp_path / "out", step=1, adapter=True)  # vLLM takes 32, and not 24; its default is 16
    assert "--enable-lora --max-lora-rank 32 --lora-modules" in (tmp_path / "out" / "README.md").read_text()


def test_the_newest_of_several_checkpoints_is_taken_and_said(lora: RunDirectory) -> None:
    assert "has checkpoints of steps 1, 2: the newest, 2, is exported" in choice_note(str(lora.path), None)
    assert choice_note(str(lora.path), 1) == ""
    assert choice_note(str(lora.checkpoints_path / "step_000001"), None) == ""


@pytest.mark.parametrize("adapter", [False, True])
def test_the_code_of_the_card_asks_as_the_run_did(adapter: bool, home: Path, model: Path, tmp_path: Path) -> None:
    """Run as it stands in the card, it gives the very reply of the run's own greedy evaluation."""
    chat = "chat={suffix: ' Box it.', examples: [{user: '1 + 1 =', assistant: '2'}], system: Be brief.}"
    words = (*LORA, "name=asked", chat, "steps=1", "eval.modes=greedy", "rollout.max_tokens=12")
    run = trained(home / f"card-{adapter}", model, *words)
    exported(run, tmp_path / "out", step=1, adapter=adapter)
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("- **Suffix**: ` Box it.`", "- **Examples**: 1 before", "at most 12 in training, 12 in evaluations"):
        assert line in card
    code = card.split("```python\n")[1].split("```")[0]
    question = code.splitlines()[-1][len("print(ask(") : -len("))")]
    held = build_task(find_target(str(run.path)).recipe.task, 5).heldout("id_probe", 8)
    code = code.replace(question, repr(held[0].messages[-1]["content"]))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "out", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (score,) = run.scores_path.glob("step_000001_*greedy*")
    said = {reply.id: reply.text for reply in read_score(score).results}[held[0].id]
    assert done.stdout.strip() == said.strip()


def test_what_is_there_is_not_overwritten(lora: RunDirectory, full: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        exported(lora, tmp_path)
    with pytest.raises(ConfigError, match="has no adapter"):
        exported(full, tmp_path / "x", adapter=True)


# --- planted faults -------------------------------------------------------------------------------------------------
Weights = dict[str, Tensor]


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.nn.Module, Weights], Weights]) -> None:
    def wrong(model: torch.nn.Module) -> Weights:
        return change(model, dict(merged_weights(model)))

    monkeypatch.setattr(module, "merged_weights", lambda model: wrong(model).items())


def refused(run: RunDirectory, out: Path, text: str) -> None:
    with pytest.raises(ExportError, match=text):
        exported(run, out / "out")
    assert list(out.iterdir()) == []


def base_of(model: Path) -> Weights:
    return {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(model).named_parameters()}


@pytest.mark.parametrize("kind", ["lora", "narrow"])
def test_a_scale_applied_twice(
    kind: str, request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(model)

    def twice(_: torch.nn.Module, weights: Weights) -> Weights:
        return {n: (2 * t.float() - base[n].to(t.dtype).float()).to(t.dtype) for n, t in weights.items()}

    plant(monkeypatch, twice)
    refused(request.getfixturevalue(kind), tmp_path, "log-probabilities differ from the trained model's")


@pytest.mark.parametrize("kind", ["lora", "narrow"])
def test_nothing_merged(
    kind: str, request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(model)
    plant(monkeypatch, lambda _, weights: {n: base[n].to(t.dtype) for n, t in weights.items()})
    refused(request.getfixturevalue(kind), tmp_path, "log-probabilities differ from")


def test_a_wrong_base(lora: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    write_tiny_model(tmp_path / "other", seed=7)
    other = base_of(tmp_path / "other")
    own = base_of(Path(find_target(str(lora.path)).recipe.model.path))
    plant(monkeypatch, lambda _, weights: {n: t - own[n] + other[n] for n, t in weights.items()})
    (tmp_path / "out").mkdir()
    refused(lora, tmp_path / "out", "log-probabilities differ from")


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_stale_step(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = request.getfixturevalue(kind)
    old = dict(merged_weights(module._trained(find_target(str(run.path), step=1)).model))
    plant(monkeypatch, lambda _, weights: old)
    refused(run, tmp_path, "log-probabilities differ from")


def test_a_missing_head(full: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda _, weights: {n: t for n, t in weights.items() if n != "lm_head.weight"})
    refused(full, tmp_path, "missing_keys: lm_head.weight")


def test_a_head_beside_a_tied_embedding(lora: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What adapters on the head or the embedding would leave: more parameters than the model has."""
    plant(monkeypatch, lambda _, weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 1.5})
    refused(lora, tmp_path, "the files have 1 tensor such as lm_head.weight, which the model does not have")


def overwrite(monkeypatch: pytest.MonkeyPatch, file: str, text: str) -> None:
    """Have an export write another text into a file beside the weights."""
    real = module.copy_model_files

    def copy(source: Path, folder: Path, dtype: str, **how: bool) -> list[str]:
        changes = real(source, folder, dtype, **how)
        (folder / file).write_text(text)
        return changes

    monkeypatch.setattr(module, "copy_model_files", copy)


def test_a_config_that_ties_what_is_not(
    full: RunDirectory, untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": True}
    overwrite(monkeypatch, "config.json", json.dumps(config))
    refused(full, tmp_path, "config.json says tie_word_embeddings: True, the weights say False")


def test_another_tokenizer(lora: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite(monkeypatch, "chat_template.jinja", "{{ messages[0]['content'] }}")
    refused(lora, tmp_path, "ids of a chat")
