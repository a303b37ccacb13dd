"""Settings of numerics: what a phase computes in, what scores are labelled with, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.config.numerics import Numerics, numeric_in
from lockstep.config.schema import Recipe


def numerics(**settings: Any) -> Numerics:
    return Numerics.model_validate(settings)


def test_phases_follow_training_unless_they_say_otherwise():
    plain, quantised = numerics(), numerics(train="mxfp4-w4a4", eval="bf16")
    assert [plain.of(phase) for phase in ("train", "rollout", "eval")] == ["", "", ""]
    assert [quantised.of(phase) for phase in ("train", "rollout", "eval")] == ["mxfp4-w4a4", "mxfp4-w4a4", ""]
    assert numerics(rollout="nvfp4-w4a16").of("train") == ""
    assert numerics(rollout="nvfp4-w4a16").of("eval") == ""


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "bf16"),
        ({"eval": "bf16", "train": "mxfp4-w4a4"}, "bf16"),
        ({"train": "mxfp4-w4a4"}, "mxfp4-w4a4(floor, bf16)"),
        ({"eval": "mxfp4-w4a16", "scale": "rceil"}, "mxfp4-w4a16(rceil, bf16)"),
        ({"train": "nvfp4-w4a4", "exclude": ["o_proj", "down_proj"]}, "nvfp4-w4a4(bf16, without down_proj o_proj)"),
    ],
)
def test_labels_say_all_that_a_score_depends_on(settings: dict[str, Any], label: str):
    assert numerics(**settings).label("eval", "bf16") == label
    assert numeric_in(label) == numerics(**settings).of("eval")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"exclude": ["o_proj"]}, "no phase quantises"),
        ({"train": "bf16", "exclude": ["o_proj"]}, "no phase quantises"),
        ({"train": "nvfp4-w4a4", "scale": "rceil"}, "no phase computes in mxfp4"),
        ({"scale": "rceil"}, "no phase computes in mxfp4"),
        ({"train": "bf16", "eval": "fp32"}, "both named"),
        ({"train": "mxfp4-w4a4", "exclude": [""]}, "empty name"),
        ({"exact": True, "eval": "nvfp4-w4a16"}, "nvfp4-w4a16, which it does not cover"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], reason: str):
    with pytest.raises(ValidationError, match=reason):
        numerics(**settings)


def test_plain_precisions_are_the_models():
    with pytest.raises(ValidationError, match=r"model.dtype=fp32"):
        Recipe.model_validate({"numerics": {"eval": "bf16"}, "model": {"dtype": "fp32"}})
    assert Recipe.model_validate({"numerics": {"eval": "bf16"}}).numerics.plain_named == "bf16"
