"""A loss of the user's own: what it may return, what it may not, and that every mistake names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.algorithms import user_loss
from lockstep.algorithms.build import build_objective
from lockstep.config.schema import Recipe
from lockstep.errors import LearnerError
from lockstep.types import Loss, LossInput

SOFT_CLIP = '''
"""Instead of a hard clip, a gradient that fades with the distance from the old policy."""
import torch
from lockstep.types import LossOutput

def soft_clip(inputs, *, sharpness=4.0):
    ratio = (inputs.logprobs_T - inputs.old_logprobs_T).exp()
    gate = torch.exp(-sharpness * (ratio - 1) ** 2).detach()
    return LossOutput(-gate * ratio * inputs.advantages_T, means={"soft_clip/gate": gate})

def plain(inputs):
    return -inputs.advantages_T * inputs.logprobs_T
'''


def inputs_of(*advantages: float) -> LossInput:
    zeros_T = torch.zeros(len(advantages), dtype=torch.float64)
    logprobs_T = (zeros_T - 0.5).requires_grad_()
    return LossInput(
        logprobs_T,
        zeros_T - 0.75,
        zeros_T - 0.25,
        torch.tensor(advantages, dtype=torch.float64),
        zeros_T + 2,
        zeros_T.long(),
        1,
    )


def recipe(path: str, settings: dict[str, Any] | None = None, **algorithm: Any) -> Recipe:
    loss = {"kind": "python", "path": path, "settings": settings} if settings else path
    return Recipe.model_validate({"algorithm": {"kind": "grpo", "loss": loss} | algorithm})


def loss_of(tmp_path: Path, body: str, settings: dict[str, Any] | None = None, **algorithm: Any) -> Loss:
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\nfrom lockstep.types import LossOutput\n{body}\n", encoding="utf-8")
    return build_objective(recipe(f"{file}:loss", settings, **algorithm)).loss


def test_an_example_file(tmp_path: Path):
    """Twenty lines and a line in the recipe: `algorithm.loss: mine.py:soft_clip`."""
    file = tmp_path / "mine.py"
    file.write_text(SOFT_CLIP, encoding="utf-8")
    objective = build_objective(recipe(f"{file}:soft_clip", {"sharpness": 2.0}))
    given = inputs_of(1.0, -2.0)
    output = objective.loss(given)
    ratio = torch.tensor(0.25, dtype=torch.float64).exp()
    gate = (-2 * (ratio - 1) ** 2).exp()
    torch.testing.assert_close(output.loss_T.detach(), torch.stack([-gate * ratio, 2 * gate * ratio]))
    torch.testing.assert_close(output.means["soft_clip/gate"], gate.expand(2))
    assert f"{file}:soft_clip(inputs, sharpness=2.0)_t" in objective.formula
    assert not objective.zero_advantage_is_zero_gradient, "nobody knows what it does with an advantage of 0"
    assert build_objective(recipe(f"{file}:plain")).loss(given).loss_T.tolist() == [0.5, -1.0]


def test_it_is_corrected_penalised_and_given_a_bonus_like_any_other(tmp_path: Path):
    body = "def loss(inputs):\n    return -inputs.advantages_T * inputs.logprobs_T"
    given = inputs_of(1.0, -2.0)  # π_old / π_rollout = exp(-1/2)
    weighed = loss_of(tmp_path, body, correction={"kind": "tis"}, entropy_coef=0.1)(given)
    factor = torch.tensor(-0.5).exp().item()
    assert weighed.loss_T.tolist() == pytest.approx([0.5 * factor - 0.2, -1.0 * factor - 0.2])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return inputs.logprobs_T.sum()", r"the loss has the shape \[\], not \[3\]"),
        ("return inputs.logprobs_T[:2]", r"the loss has the shape \[2\], not \[3\]"),
        ("return inputs.logprobs_T[:, None]", r"the loss has the shape \[3, 1\], not \[3\]"),
        ("return 1.0", "the loss is a float, not a tensor"),
        ("return None", "the loss is a NoneType, not a tensor"),
        ("return LossOutput([1.0])", "the loss is a list, not a tensor"),
        ("return inputs.logprobs_T * torch.tensor([1, float('nan'), 1])", "the loss of token 1 of 3 is nan"),
        ("return inputs.logprobs_T / torch.tensor([1, 1, 0.0])", "the loss of token 2 of 3 is -inf"),
        ("return inputs.logprobs_T.detach()", "the loss has no gradient"),
        ("return -inputs.advantages_T", "the loss has no gradient"),
        (
            "return LossOutput(inputs.logprobs_T, means={'a': inputs.logprobs_T.mean()})",
            r"the metric a has the shape \[\]",
        ),
        ("return LossOutput(inputs.logprobs_T, maxima={'a': 3})", "the metric a is a int, not a tensor"),
        ("return LossOutput(inputs.logprobs_T, None)", "the metrics of the loss are None, not tensors by name"),
        (
            "return LossOutput(inputs.logprobs_T, {1: inputs.logprobs_T})",
            "the metrics of the loss are {1: .*, not tensors by",
        ),
        ("return inputs.log_probs", r"the loss fails: AttributeError: .*log_probs.*mine.py:4\)"),
        ("raise SystemError('no')", "the loss fails: SystemError: no"),
    ],
)
def test_an_unusable_result_is_refused_before_the_run_and_names_the_function(tmp_path: Path, body: str, message: str):
    with pytest.raises(LearnerError, match=message) as caught:
        loss_of(tmp_path, f"def loss(inputs):\n    {body}")
    assert caught.value.where.endswith("mine.py:loss")
    assert caught.value.fix


def test_a_result_that_becomes_unusable_stops_the_update(tmp_path: Path):
    loss = loss_of(tmp_path, "def loss(inputs):\n    return inputs.logprobs_T[:3]")  # as many as it is tried on
    with pytest.raises(LearnerError, match=r"the loss has the shape \[3\], not \[4\]"):
        loss(inputs_of(1.0, 2.0, 3.0, 4.0))


def test_a_loss_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_loss, "TRIAL_S", 0.2)
    with pytest.raises(LearnerError, match=r"did not return within 0\.2 s on three tokens"):
        loss_of(tmp_path, "import time\n\ndef loss(inputs):\n    time.sleep(5)")


def test_a_loss_with_tensors_on_a_gpu_is_tried_there(tmp_path: Path):
    body = "def loss(inputs):\n    if not inputs.logprobs_T.is_cuda:\n        raise RuntimeError('cuda:0 and cpu!')"
    assert loss_of(tmp_path, body)


def test_a_loss_is_tried_with_a_reference_where_the_run_has_one(tmp_path: Path):
    body = "def loss(inputs):\n    return inputs.logprobs_T - inputs.ref_logprobs_T"
    with pytest.raises(LearnerError, match="the loss fails: TypeError"):
        loss_of(tmp_path, body)
    assert loss_of(tmp_path, body, kl={"coef": 0.1})


@pytest.mark.parametrize(
    ("body", "settings", "message"),
    [
        ("loss = 3", None, "the path names an object of type int, not a function"),
        ("def other(inputs): ...", None, "has no loss"),
        ("from math import log as loss", None, "its parameters are not known: no signature found for builtin"),
        ("async def loss(inputs): ...", None, "the function is async"),
        ("def loss(): ...", None, r"the function is defined with \(\), but would be called with \(inputs\)"),
        ("def loss(inputs, alpha): ...", None, "missing a required argument: 'alpha'"),
        ("def loss(inputs, alpha=1): ...", {"alhpa": 2}, "unexpected keyword argument 'alhpa'"),
        ("def loss(inputs, alpha=1): ...", {"inputs": 2}, "multiple values for argument 'inputs'"),
        ("1 / 0", None, "the file does not run: ZeroDivisionError"),
    ],
)
def test_an_unusable_function_is_refused_before_the_run(
    tmp_path: Path, body: str, settings: dict[str, Any] | None, message: str
):
    with pytest.raises(LearnerError, match=message):
        loss_of(tmp_path, body, settings)


def test_a_missing_file_is_refused_before_the_run(tmp_path: Path):
    with pytest.raises(LearnerError, match="there is no such file"):
        build_objective(recipe(f"{tmp_path}/none.py:loss"))
