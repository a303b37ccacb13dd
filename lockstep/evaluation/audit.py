"""Chooses wrong replies for a person to read: is the answer wrong, or did the verifier read it wrongly?"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.evaluation.alarms import UNPARSED, ceiling, reading
from lockstep.evaluation.intervals import wilson
from lockstep.seeds import seed_for
from lockstep.types import ItemResult, Score

SHOWN = 50
TAIL = 300
"""Number of characters of a reply's end that are shown and searched: answers stand there."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A wrong reply, and whether the reference answer stands in its end although something else was read."""

    result: ItemResult
    suspicious: bool


@dataclass(frozen=True, slots=True)
class ParserAudit:
    """Replies that a person should read, and counts that need none."""

    wrong: int
    shown: tuple[Suspect, ...]
    suspicious: int
    """Number of suspicious replies among all wrong ones."""
    methods: tuple[tuple[str, int], ...]
    """Methods by which the wrong replies were read, most frequent first."""


def audit_parser(score: Score, count: int = SHOWN) -> ParserAudit:
    """Draw up to `count` wrong replies from the score's weights and conditions alone: the same every time."""
    wrong = [result for result in score.results if result.correct is False]
    marked = [Suspect(result, is_suspicious(result)) for result in wrong]
    rng = random.Random(seed_for("audit", score.conditions.weights, score.conditions.data_hash, score.conditions.mode))
    chosen = sorted(rng.sample(range(len(marked)), min(count, len(marked))))
    methods = Counter(result.method or "not said" for result in wrong)
    return ParserAudit(
        len(wrong),
        tuple(marked[i] for i in chosen),
        sum(one.suspicious for one in marked),
        tuple(methods.most_common()),
    )


def is_suspicious(result: ItemResult) -> bool:
    """Return whether the reference answer stands as a whole word in the end of a reply that was graded wrong."""
    answer = result.answer.strip()
    if not answer:
        return False
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?![\w]|\.\d)", result.text[-TAIL:]) is not None


def summary_lines(score: Score, audit: ParserAudit) -> list[str]:
    """Return counts and conclusions from them."""
    r = reading(score.results)
    lines = [
        f"{audit.wrong} of {r.scored} scored replies are wrong; {r.wrong_truncated} of those were cut off",
        "read by: " + (", ".join(f"{name} {count}" for name, count in audit.methods) or "nothing"),
    ]
    if r.boxed_rate is not None:
        box = wilson(r.boxed, r.says_boxed)
        lines.append(f"boxed rate {r.boxed_rate:.1%} [{box.low:.1%}, {box.high:.1%}] of all {r.says_boxed} replies")
    if r.unparsed_rate is not None:
        lines.append(
            f"no answer found in {r.unparsed} replies ({r.unparsed_rate:.1%}, {r.unparsed_truncated} of them cut off): the score "
            f"could reach {ceiling(score):.1%} at most"
        )
        if r.unparsed_rate > UNPARSED:
            lines.append(
                f"above {UNPARSED:.0%}: fix the parser, the format or the token budget before you trust the score"
            )
    if audit.wrong:
        share = wilson(audit.suspicious, audit.wrong)
        lines.append(
            f"{audit.suspicious} wrong replies ({audit.suspicious / audit.wrong:.0%} [{share.low:.0%}, {share.high:.0%}]) end "
            "with the reference answer in them, marked ?: if reading them shows more than 5% misread, fix the parser first"
        )
    return lines


def suspect_lines(number: int, one: Suspect) -> list[str]:
    """Return a reply for reading: what was expected, what was read and how, and the reply's end."""
    from lockstep.track.text import one_line, reading_line

    r = one.result
    facts = [reading_line(r.extracted, r.method, r.answer), f"{r.tokens} tokens"]
    facts += ["cut off"] if r.truncated else []
    facts += ["no box"] if r.boxed is False else []
    head = f"{number:>3} {'?' if one.suspicious else ' '} {one_line(r.id, 60)} #{r.sample}: {', '.join(facts)}"
    start = "…" if len(r.text) > TAIL else ""
    return [head, f"      {start}{one_line(r.text[-TAIL:])}"]


def text_of(score: Score, audit: ParserAudit) -> list[str]:
    """Return the whole audit."""
    shown: Sequence[Suspect] = audit.shown
    return [
        *summary_lines(score, audit),
        f"{len(shown)} of {audit.wrong} wrong replies:",
        *(line for i, one in enumerate(shown, 1) for line in suspect_lines(i, one)),
    ]
