"""A score is labelled with what the engine computes in, or refused."""

from __future__ import annotations

import pytest

from lockstep.errors import EvaluationError
from lockstep.evaluation.runner import require_numerics
from lockstep.types import Forward
from tests.learner.models import plain, twin
from tests.rollout.engines import engine_over


def test_a_label_that_is_not_what_computes_is_refused():
    engine = engine_over(twin(plain("llama")))
    require_numerics(engine, "bf16")
    with pytest.raises(
        EvaluationError, match=r"labelled mxfp4-w4a4\(floor, bf16\), but the engine computes in the precision"
    ):
        require_numerics(engine, "mxfp4-w4a4(floor, bf16)")
    engine.set_forward(Forward("mxfp4-w4a4"))
    require_numerics(engine, "mxfp4-w4a4(rceil, bf16, without o_proj)")
    with pytest.raises(EvaluationError, match="labelled bf16, but the engine computes in mxfp4-w4a4"):
        require_numerics(engine, "bf16")
