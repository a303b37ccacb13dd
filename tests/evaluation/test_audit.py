from __future__ import annotations

import dataclasses

from lockstep.evaluation.audit import audit_parser, is_suspicious, summary_lines, text_of
from lockstep.types import Score
from tests.evaluation.scores import score


def example() -> Score:
    base = score([True] * 40 + [False] * 60)
    results = [
        dataclasses.replace(
            r,
            text="so it is \\boxed{8}" if i % 3 else "thus the answer is 7.",
            extracted="8" if i % 3 else None,
            method="boxed" if i % 3 else "none",
            boxed=bool(i % 3),
            truncated=i % 10 == 9,
        )
        for i, r in enumerate(base.results)
    ]
    return dataclasses.replace(base, results=tuple(results))


def test_fifty_wrong_replies_are_shown_with_what_was_read() -> None:
    audit = audit_parser(example())
    assert (audit.wrong, len(audit.shown)) == (60, 50)
    assert audit == audit_parser(example())  # the same fifty every time
    assert {one.result.correct for one in audit.shown} == {False}
    lines = text_of(example(), audit)
    assert "50 of 60 wrong replies:" in lines
    assert any("no answer was found in the reply, answer '7', 4 tokens" in line and "no box" in line for line in lines)
    assert any("extracted '8' by boxed" in line and "cut off" in line for line in lines)
    assert sum(line.strip() == "thus the answer is 7." for line in lines) == sum(s.suspicious for s in audit.shown)


def test_counts_cover_all_wrong_replies_not_only_those_shown() -> None:
    audit = audit_parser(example(), 5)
    wrong = list(range(40, 100))
    unread = sum(i % 3 == 0 for i in wrong)
    assert len(audit.shown) == 5
    assert audit.suspicious == unread  # they end with the reference answer, and nothing was read
    assert dict(audit.methods) == {"boxed": 60 - unread, "none": unread}
    text = "\n".join(summary_lines(example(), audit))
    assert "60 of 100 scored replies are wrong; 6 of those were cut off" in text
    assert "boxed rate 66.0% [56.3%, 74.5%] of all 100 replies" in text
    assert f"no answer found in {unread} replies" in text
    assert "fix the parser, the format or the token budget" in text


def test_a_reference_counts_only_as_a_word_of_its_own_near_the_end() -> None:
    one = score([False]).results[0]
    for text, suspicious in [
        ("the answer is 7", True),
        ("**7**", True),
        ("7.", True),
        ("17", False),
        ("7.5", False),
        ("x7", False),
        ("7" + " and so on" * 100, False),
        ("", False),
    ]:
        assert is_suspicious(dataclasses.replace(one, text=text)) is suspicious, text
    assert not is_suspicious(dataclasses.replace(one, answer="", text="anything"))


def test_a_score_without_wrong_replies_has_nothing_to_read() -> None:
    audit = audit_parser(score([True, True]))
    assert (audit.wrong, audit.shown) == (0, ())
    assert summary_lines(score([True, True]), audit)[0] == "0 of 2 scored replies are wrong; 0 of those were cut off"
