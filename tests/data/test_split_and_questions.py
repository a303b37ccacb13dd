from __future__ import annotations

import random
import re

import pytest

from lockstep.data.questions import data_hash, normalised_question, question_digest
from lockstep.data.split import refuse_overlap, split
from lockstep.errors import DataError
from lockstep.types import Prompt


def ask(key: str, text: str, answer: str = "1") -> Prompt:
    return Prompt(key, ({"role": "user", "content": text},), answer)


PROMPTS = [ask(f"t/{i}", f"What is {i} + 1?") for i in range(100)]


def test_normalised_question():
    prompt = ask("a", "  What\u00a0is\n\n2 ＋ 2 ? ")
    assert normalised_question(prompt.messages) == "what is 2 + 2 ?"
    turns = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2"})
    assert normalised_question(turns) == "add. 2"


def test_digest_is_pinned():
    # Changing it would move questions between training and the held-out side of every task.
    assert question_digest(ask("a", "What is 2 + 2?").messages).hex()[:16] == "692a9daa52e42c50"


def test_split_shares_no_question_and_loses_none():
    parts = split(PROMPTS, 30)
    assert len(parts.heldout) == 30
    assert sorted(p.id for p in parts.train + parts.heldout) == sorted(p.id for p in PROMPTS)
    refuse_overlap(parts.train, parts.heldout, "a and b")
    assert parts.dropped == 0
    assert [p.id for p in parts.train] == [p.id for p in PROMPTS if p in parts.train]  # order kept


def test_split_depends_on_the_texts_alone():
    shuffled = random.Random(0).sample(PROMPTS, len(PROMPTS))
    renamed = [Prompt("x" + p.id, p.messages, "2") for p in shuffled]
    first, second = split(PROMPTS, 30), split(renamed, 30)
    assert [p.messages for p in first.heldout] == [p.messages for p in second.heldout]
    smaller = split(PROMPTS, 10)
    assert smaller.heldout == first.heldout[:10]


def test_repeats_of_a_held_out_question_do_not_train():
    held = split(PROMPTS, 30).heldout[0]
    again = ask("t/again", "  " + held.messages[0]["content"].upper())
    parts = split([*PROMPTS, again], 30)
    assert parts.dropped == 1
    assert again not in parts.train
    assert len(parts.train) == 70


def test_split_needs_something_to_train_on():
    with pytest.raises(
        DataError,
        match=r"rows.jsonl: 100 questions are to be held out, which leaves none to train on: there are 100 different",
    ):
        split([*PROMPTS, *PROMPTS], 100, where="rows.jsonl")
    assert len(split(PROMPTS, 0).train) == 100


def test_overlap_is_named():
    probe = [ask("p/1", "what is  5 + 1?"), ask("p/2", "What is 500 + 1?")]
    names = "1 of 2 held-out questions are also training questions: p/1 = t/5 ('what is  5 + 1?')"
    with pytest.raises(DataError, match=re.escape(names)):
        refuse_overlap(PROMPTS, probe, "a and b")
    refuse_overlap(PROMPTS, probe[1:], "a and b")


def test_data_hash_is_pinned_and_sees_everything():
    prompts = (ask("a", "p", "1"), ask("b", "q", "2"))
    first = data_hash(prompts)
    assert first == "3eff80e9d8827ecc"
    others = [
        (ask("a", "p", "1"),),
        (ask("c", "p", "1"), prompts[1]),
        (ask("a", "P", "1"), prompts[1]),
        (ask("a", "p", "3"), prompts[1]),
        (prompts[1], prompts[0]),
        (Prompt("a", ({"role": "system", "content": "p"},), "1"), prompts[1]),
    ]
    assert len({first, *(data_hash(other) for other in others)}) == 7
