"""A process that holds the weights of one checkpoint and samples replies to prompts: `python -m lockstep.view.sampler RUN STEP`.

It writes a line of JSON when it is ready, then one for each line of JSON that it reads. It exits when its input ends. Errors
are lines with `error`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.scoring.targets import EvalSession


def main(run: str, step: str, *overrides: str) -> None:
    """Serve until the input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print must not stand between the answers

        def answer(value: object) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        try:
            session, numerics, ready = _loaded(run, int(step), overrides)
        except LockstepError as error:
            return answer({"error": str(error)})
        answer(ready)
        for line in sys.stdin:
            try:
                answer(draw(session, numerics, json.loads(line)))
            except LockstepError as error:
                session.engine.close()
                answer({"error": str(error)})


def _loaded(run: str, step: int, overrides: Sequence[str]) -> tuple[EvalSession, str, dict[str, object]]:
    """Load the weights and prove that the engine has them. Raises the errors of `lockstep sample`."""
    from lockstep.scoring.score import placed, saved_of
    from lockstep.scoring.targets import build_eval_session, find_target

    target = find_target(run, (), overrides, step)
    session = build_eval_session(target.recipe)
    numerics = target.recipe.numerics.label("eval", session.policy.numerics)
    proof = placed(target, session, saved_of(target, session))
    device = str(next(session.policy.model.parameters()).device)
    return session, numerics, {"weights": proof.fingerprint, "numerics": numerics, "device": device}


def draw(session: EvalSession, numerics: str, ask: dict[str, Any]) -> dict[str, object]:
    """Sample `count` replies to `text`, framed as the recipe's questions or, if `raw`, as it is.

    Raises ChatError or EngineError.
    """
    from lockstep.chat.chat import check_length
    from lockstep.evaluation.runner import require_numerics
    from lockstep.run.evaluation import computing
    from lockstep.seeds import seed_for
    from lockstep.types import Request, Sampling
    from lockstep.view.tokens import pieces

    engine, policy, version = session.engine, session.policy, session.learner.version
    if ask["raw"]:
        ids = tuple(policy.tokenizer.encode(ask["text"], add_special_tokens=False))
    else:
        ids = policy.chat.render(({"role": "user", "content": ask["text"]},))
    sampling = Sampling(ask["tokens"], ask["temperature"], top_p=ask["top_p"])
    if policy.context is not None:
        check_length("the prompt", len(ids), sampling.max_tokens, policy.context)
    seeds = [seed_for(ask["seed"], "view", number) for number in range(ask["count"])]
    with computing(engine, numerics):
        require_numerics(engine, numerics)
        engine.submit([Request(f"prompt#{n}", ids, "prompt", seed, sampling, version) for n, seed in enumerate(seeds)])
        found = sorted(engine.completed(), key=lambda one: int(one.request.id.partition("#")[2]))
        # A greedy choice has probability 1 under its own distribution: show the model's at temperature 1 instead.
        greedy = engine.score([(*ids, *one.ids) for one in found]) if sampling.temperature == 0 else None

    replies = [
        {
            "pieces": pieces(one.ids, policy.chat.shown),
            "logprobs": greedy[n][len(ids) - 1 :] if greedy else one.logprobs,
            "finish": one.finish.value,
        }
        for n, one in enumerate(found)
    ]
    return {"replies": replies, "seen": policy.chat.shown(ids), "length": len(ids)}


if __name__ == "__main__":
    main(*sys.argv[1:])
