"""The rows of an episode: every sampled token once, after exactly the tokens that it was sampled after."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lockstep.rollout.branches import branches_of
from lockstep.types import Branch, Completion, FinishReason, Request, Sampling, TokenIds


def completion(prompt: TokenIds, ids: TokenIds, number: int = 0) -> Completion:
    request = Request(f"r{number}", prompt, "g", number, Sampling(8), 0)
    logprobs = tuple(-0.01 * (number + 1) - 0.001 * place for place in range(len(ids)))
    return Completion(request, ids, logprobs, FinishReason.STOP, 0)


def test_a_conversation_is_one_row() -> None:
    found = branches_of([completion((1, 2), (3, 4)), completion((1, 2, 3, 4, 9), (5,), 1)])
    assert found == (Branch((1, 2), (3, 4, 9, 5), (-0.01, -0.011, 0.0, -0.02), (True, True, False, True)),)


def test_a_rewritten_history_is_a_row_of_its_own_and_is_continued() -> None:
    turns = [
        completion((1, 2), (3,)),
        completion((1, 2, 3, 9), (4,), 1),
        completion((1, 7), (5,), 2),  # a summary in place of the history
        completion((1, 7, 5, 9), (6,), 3),
    ]
    old, new = branches_of(turns)
    assert (old.prompt_ids, old.ids, old.trained) == ((1, 2), (3, 9, 4), (True, False, True))
    assert (new.prompt_ids, new.ids, new.trained) == ((1, 7), (5, 9, 6), (True, False, True))


def test_a_fork_repeats_sampled_tokens_as_context_alone() -> None:
    """Both second turns answer the same first one: its tokens are trained in the first row, where they were sampled."""
    turns = [completion((1,), (2, 3)), completion((1, 2, 3, 8), (4,), 1), completion((1, 2, 3, 9), (5,), 2)]
    first, fork = branches_of(turns)
    assert first.trained == (True, True, False, True)
    assert (fork.prompt_ids, fork.ids, fork.trained) == ((1, 2, 3, 9), (5,), (True,))


def test_two_samples_of_one_request_are_two_rows() -> None:
    assert [row.ids for row in branches_of([completion((1,), (2,)), completion((1,), (2,), 1)])] == [(2,), (2,)]


@st.composite
def episodes(draw: st.DrawFn) -> list[Completion]:
    """An agent that goes on, goes back to any earlier state, or begins anew; few different tokens, so that prefixes meet."""
    token = st.integers(0, 2)
    some = st.lists(token, min_size=1, max_size=3).map(tuple)
    states: list[TokenIds] = [()]
    done: list[Completion] = []
    for number in range(draw(st.integers(1, 9))):
        before = draw(st.sampled_from([states[-1], *states]))
        kept = before[: draw(st.integers(0, len(before)))] if draw(st.booleans()) else before
        prompt = (*kept, *(draw(some) if not kept or draw(st.booleans()) else ()))
        done.append(completion(prompt, draw(some), number))
        states.append((*prompt, *done[-1].ids))
    return done


@given(episodes())
def test_every_sampled_token_is_trained_once_after_what_it_was_sampled_after(done: list[Completion]) -> None:
    rows = branches_of(done)
    spans = Counter()
    for row in rows:
        whole = (*row.prompt_ids, *row.ids)
        assert len(row.ids) == len(row.logprobs) == len(row.trained)
        for place, own in enumerate(row.trained):
            if own:
                at = len(row.prompt_ids) + place
                spans[whole[:at], whole[at], row.logprobs[place]] += 1
            else:
                assert row.logprobs[place] == 0.0
    wanted = Counter(
        ((*one.request.prompt_ids, *one.ids[:t]), one.ids[t], one.logprobs[t])
        for one in done
        for t in range(len(one.ids))
    )
    assert spans == wanted, "each token with the engine's log-probability, after exactly the engine's context"


@given(episodes())
def test_a_row_begins_only_where_none_can_be_continued(done: list[Completion]) -> None:
    """The rows are as few as an agent that goes on allows: a request that continues the last row's end adds none."""
    before: tuple[Branch, ...] = ()
    for count in range(1, len(done) + 1):
        rows = branches_of(done[:count])
        prompt = done[count - 1].request.prompt_ids
        ends = [(*row.prompt_ids, *row.ids) for row in before]
        continues = any(prompt[: len(end)] == end for end in ends)
        assert len(rows) == len(before) + (not continues)
        before = rows
