"""Every kind of adapter: trained, resumed, exported merged, loaded in plain transformers, evaluated: one model all the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.export import check
from lockstep.export.export import export
from lockstep.export.verify import EXACT
from lockstep.loops.start import resume_run, start_run
from lockstep.scoring.targets import build_eval_session, find_target
from tests.learner.kinds import KINDS
from tests.learner.models import logprobs_of, tokens
from tests.loops.runs import NO_EVAL, fingerprints, recipe

IDS = tokens(30, 3)


@pytest.mark.sampled("none", "lora", "pissa-rslora-dora", "oft")
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_kind_is_one_model_from_training_to_evaluation(
    kind: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    adapter = {} if kind == "none" else {"adapter": KINDS[kind]}
    asked = recipe(tmp_path, tiny_model_dir, NO_EVAL, "steps=2", "save.keep_last=2", "optimizer.lr=0.02")
    run = start_run(type(asked).model_validate(asked.model_dump() | adapter))

    # resume: the second step anew
    trained = fingerprints(run)[2]
    shutil.rmtree(run.checkpoints_path / "step_000002")
    run = resume_run(run.path, allow_fallback=True)
    assert fingerprints(run)[2] == trained

    # what trained, by the engine of an evaluation
    session = build_eval_session(find_target(str(run.path)).recipe)
    session.prove_saved(session.read(find_target(str(run.path)).checkpoint))  # type: ignore[arg-type]
    expected = torch.tensor(session.engine.score([IDS])[0])

    # exported merged, loaded in plain transformers, evaluated
    done = export(find_target(str(run.path), step=2), tmp_path / "out", check=check.answer)
    assert done.verified.trained.max <= EXACT
    assert done.verified.base.mean > 1e-3
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    torch.testing.assert_close(logprobs_of(plain, IDS), expected, rtol=0, atol=EXACT)
    words = [str(tmp_path / "recipe.yaml"), "device=cpu"]
    mine = build_eval_session(find_target(str(tmp_path / "out"), words).recipe)
    assert mine.prove().fingerprint == done.fingerprint
    torch.testing.assert_close(torch.tensor(mine.engine.score([IDS])[0]), expected, rtol=0, atol=EXACT)

    if kind != "none":
        own = export(find_target(str(run.path), step=2), tmp_path / "adapter", adapter=True, check=check.answer)
        assert own.verified.trained.max <= EXACT
