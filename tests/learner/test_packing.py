"""From sequences to streams: every token once, prompts once a group, budgets kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LearnerError
from lockstep.learner.packing import as_sequence, microbatches, number_tokens, pack, per_token
from lockstep.learner.ranks import deal
from lockstep.models.attention import AttentionKind
from lockstep.types import TrainSequence

CPU = torch.device("cpu")


def sequence(
    prompt: tuple[int, ...], ids: tuple[int, ...], group: int, trained: tuple[bool, ...] = ()
) -> TrainSequence:
    zeros = (0.0,) * len(ids)
    return TrainSequence(prompt, ids, trained or (True,) * len(ids), zeros, zeros, 1.0, group)


FOUR = (
    sequence((1, 2, 3), (10, 11), 0),
    sequence((4,), (20, 21, 22), 1, (True, False, True)),
    sequence((1, 2, 3), (12, 13, 14), 0),
    sequence((4,), (23,), 1),
)


def test_a_stream_by_hand():
    packed = pack(FOUR, [0, 2, 1, 3], share_prompts=True, device=CPU)
    #                               prompt 0   | 10 | 12 13 | prompt 1 | 20 21 |
    assert packed.ids_T.tolist() == [1, 2, 3, 10, 12, 13, 4, 20, 21]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 3, 4, 0, 1, 2]
    # Each target is predicted from the token before it; the first of a response from the end of the prompt.
    assert packed.targets_R.tolist() == [10, 11, 12, 13, 14, 20, 22, 23]
    assert packed.rows_R.tolist() == [2, 3, 2, 4, 5, 6, 8, 6]
    assert packed.sequence_R.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    assert packed.order == (0, 2, 1, 3)
    assert packed.tokens == 9


def test_a_stream_with_prompts_first_by_hand():
    packed = pack(FOUR, [0, 2, 1, 3], share_prompts=True, device=CPU, prompts_first=True)
    #                              prompts     | 10 | 12 13 | 20 21 |
    assert packed.ids_T.tolist() == [1, 2, 3, 4, 10, 12, 13, 20, 21]
    assert packed.positions_T.tolist() == [0, 1, 2, 0, 3, 3, 4, 1, 2]
    assert packed.targets_R.tolist() == [10, 11, 12, 13, 14, 20, 22, 23]
    assert packed.rows_R.tolist() == [2, 4, 2, 5, 6, 3, 8, 3]
    assert packed.sequence_R.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    only_prompt_first = pack(FOUR, [3, 0], share_prompts=True, device=CPU, prompts_first=True)
    assert only_prompt_first.ids_T.tolist() == [1, 2, 3, 4, 10], "who feeds no response comes last"
    assert only_prompt_first.rows_R.tolist() == [3, 2, 4]


@pytest.mark.parametrize("prefix", [0, 1])
def test_the_order_of_the_stream_changes_nothing(prefix: int):
    """The same values at the same tokens, whatever their place; with a window, too."""
    generator = torch.Generator().manual_seed(0)
    begun = [replace(s, prompt_ids=(9,) * prefix + s.prompt_ids) for s in FOUR]
    numbers = torch.randn(3, 2, 100, generator=generator, dtype=torch.float64)  # by token id and position
    outputs = []
    for prompts_first in (False, True):
        packed = pack(begun, [3, 0, 2, 1], share_prompts=True, device=CPU, prefix=prefix, prompts_first=prompts_first)
        query, key, value = (one[:, packed.ids_T, None] * (1 + packed.positions_T[:, None]) for one in numbers)
        for kind in (AttentionKind(1.0), AttentionKind(1.0, window=2)):
            output_THD = packed.layout.attend(0, query, key, value, kind)
            outputs.append(output_THD[packed.rows_R])
        assert packed.targets_R.tolist() == [23, 10, 11, 12, 13, 14, 20, 22]
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[3])
    assert not torch.allclose(outputs[0], outputs[1])


def test_values_per_token_leave_out_untrained_ones_and_must_fit():
    like = torch.zeros(0)
    assert per_token(FOUR[:2], [[1.0, 2.0], [3.0, 4.0, 5.0]], like).tolist() == [1.0, 2.0, 3.0, 5.0]
    assert per_token([], [], like).tolist() == []
    assert per_token(FOUR[:1], [[0.1, 1e300]], like.double()).tolist() == [0.1, 1e300]
    with pytest.raises(ValueError, match="3 values for a response of 2 tokens"):
        per_token(FOUR[:1], [[1.0, 2.0, 3.0]], like)


def test_numbers_go_back_to_their_sequences():
    streams = [pack(FOUR, [2, 1], share_prompts=True, device=CPU), pack(FOUR, [0, 3], share_prompts=True, device=CPU)]
    found = number_tokens(FOUR, streams, lambda packed: packed.targets_R.float())
    assert found == [(10.0, 11.0), (20.0, 0.0, 22.0), (12.0, 13.0, 14.0), (23.0,)]


def test_without_sharing_every_response_has_its_prompt():
    packed = pack(FOUR, [0, 2], share_prompts=False, device=CPU)
    assert packed.ids_T.tolist() == [1, 2, 3, 10, 1, 2, 3, 12, 13]
    assert packed.rows_R.tolist() == [2, 3, 6, 7, 8]


def test_microbatches_by_hand():
    assert microbatches(FOUR, 100, share_prompts=True) == [[0, 2, 1, 3]]
    assert microbatches(FOUR, 6, share_prompts=True) == [[0, 2], [1, 3]]  # 3 + 1 + 2, then 1 + 2 + 0
    # three would fit, but not on two ranks; the largest comes first
    assert (
        microbatches(FOUR, 5, share_prompts=True) == microbatches(FOUR, 1, share_prompts=True) == [[2], [0], [1], [3]]
    )
    assert microbatches([], 5, share_prompts=True) == []


@given(
    shapes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=14),
    prompts=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    budget=st.integers(1, 60),
    share=st.booleans(),
    prefix=st.integers(0, 5),
)
def test_every_sequence_comes_once_and_budgets_are_kept(
    shapes: list[tuple[int, int]], prompts: list[int], budget: int, share: bool, prefix: int
):
    sequences = [
        sequence((7,) * prefix + tuple(range(100 * group, 100 * group + prompts[group])), tuple(range(length)), group)
        for group, length in shapes
    ]
    chunks = microbatches(sequences, budget, share_prompts=share, prefix=prefix)
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(sequences)))
    for chunk in chunks:
        packed = pack(sequences, chunk, share_prompts=share, device=CPU, prefix=prefix)
        expected = sum(max(0, len(sequences[i].ids) - 1) for i in chunk)
        own = [sequences[i].group for i in chunk]
        expected += sum(prompts[group] for group in (set(own) if share else own))
        expected += prefix if share else prefix * len(chunk)
        assert packed.tokens == packed.positions_T.numel() == expected
        assert packed.tokens <= budget or len(chunk) == 1
        assert packed.targets_R.tolist() == [token for i in chunk for token in sequences[i].ids]
        assert packed.ids_T.dtype == packed.rows_R.dtype == packed.targets_R.dtype == torch.int64
    loads = [pack(sequences, chunk, share_prompts=share, device=CPU, prefix=prefix).tokens for chunk in chunks]
    assert loads == sorted(loads, reverse=True)
    first, *others = sorted(range(len(sequences)), key=lambda index: sequences[index].group)
    fewest = [[first]]  # each full before the next begins
    for index in others:
        if pack(sequences, [*fewest[-1], index], share_prompts=share, device=CPU, prefix=prefix).tokens <= budget:
            fewest[-1].append(index)
        else:
            fewest.append([index])
    assert len(fewest) <= len(chunks) <= len(fewest) + 3


def test_microbatches_are_equally_large_and_even_in_number():
    """64 groups of eight replies of 512 tokens: 19.4 times the budget. A full one has 26 replies, and the last would have 18."""
    sequences = [sequence((7,) * 256, (5,) * 512, group) for group in range(64) for _ in range(8)]
    chunks = microbatches(sequences, 14336, share_prompts=True)
    assert {len(chunk) for chunk in chunks} == {25, 26}
    assert len(chunks) == 20
    loads = [pack(sequences, chunk, share_prompts=True, device=CPU).tokens for chunk in chunks]
    assert all(len(set(each)) == 1 for ranks in (2, 4) for each in deal(loads, ranks))
    numbers = [len(microbatches(sequences[:count], 14336, share_prompts=True)) for count in (20, 40, 60, 230, 300)]
    assert numbers == [1, 2, 4, 12, 12]


def test_what_a_token_sees_is_its_prompt_and_its_own_response():
    """Attention weights show through values: with equal scores, an output is the mean of the values seen."""
    packed = pack(FOUR, [0, 2, 1, 3], share_prompts=True, device=CPU)
    tokens, padded = packed.tokens, 16
    values = torch.zeros(1, padded, 16)
    values[0, torch.arange(padded), torch.arange(padded)] = 1.0  # each token's value is its own coordinate
    queries = torch.zeros(2, padded, 16)
    output_THD = packed.layout.attend(0, queries, torch.zeros(1, padded, 16), values, AttentionKind(1.0))
    seen = [set(row.nonzero()[:, 0].tolist()) for row in output_THD[:, 0]]
    prompt = [{0}, {0, 1}, {0, 1, 2}]
    assert seen[:tokens] == [
        *prompt,
        {0, 1, 2, 3},  # 10
        {0, 1, 2, 4},  # 12, which does not see 10
        {0, 1, 2, 4, 5},  # 13
        {6},  # the second prompt sees nothing of the first
        {6, 7},
        {6, 7, 8},
    ]
    assert not output_THD[tokens:].any(), "padding"
    assert torch.equal(output_THD[:, 0], output_THD[:, 1])
    narrow = packed.layout.attend(0, queries, torch.zeros(1, padded, 16), values, AttentionKind(1.0, window=2))
    seen = [set(row.nonzero()[:, 0].tolist()) for row in narrow[:tokens, 0]]
    assert seen == [{0}, {0, 1}, {1, 2}, {2, 3}, {2, 4}, {4, 5}, {6}, {6, 7}, {7, 8}]


@pytest.mark.parametrize("other", [(1, 2, 4), (1, 2, 3, 4), (1, 3)])
def test_each_prompt_of_a_group_is_processed_once_and_belongs_to_its_own_responses(other: tuple[int, ...]):
    """Rows of an episode whose history was rewritten have other prompts than the rest of their group."""
    mine = (1, 2, 3)
    given = (sequence(mine, (10, 11), 0), sequence(other, (12, 13), 0), sequence(mine, (14, 15), 0))
    (chosen,) = microbatches(given, 100, share_prompts=True, prefix=1)
    assert chosen == [0, 2, 1]
    packed = pack(given, chosen, share_prompts=True, device=CPU, prefix=1)
    assert packed.ids_T.tolist() == [1, 2, 3, 10, 14, *other[1:], 12]
    assert packed.targets_R.tolist() == [10, 11, 14, 15, 12, 13]
    assert packed.rows_R.tolist() == [2, 3, 2, 4, 3 + len(other), 4 + len(other)]
    assert pack(given, [0, 1], share_prompts=False, device=CPU).tokens == 4 + len(other) + 1


def test_with_a_shared_beginning_everyone_sees_it():
    given = (sequence((9, 8, 1), (10, 11), 0), sequence((9, 8, 2, 3), (20, 21), 1))
    packed = pack(given, [0, 1], share_prompts=True, device=CPU, prefix=2)
    assert packed.ids_T.tolist() == [9, 8, 1, 10, 2, 3, 20]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert packed.rows_R.tolist() == [2, 3, 5, 6]
    values = torch.eye(16)[None]
    output_THD = packed.layout.attend(0, torch.zeros(1, 16, 16), torch.zeros(1, 16, 16), values, AttentionKind(1.0))
    seen = [set(row.nonzero()[:, 0].tolist()) for row in output_THD[:7, 0]]
    assert seen == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 4}, {0, 1, 4, 5}, {0, 1, 4, 5, 6}]
    with pytest.raises(LearnerError, match="sequence 1 does not begin with the 3 tokens"):
        pack((sequence((9, 8, 1, 5), (10,), 0), given[1]), [0, 1], share_prompts=True, device=CPU, prefix=3)


@pytest.mark.parametrize("ids", [(5,), (5, 6), (5, 6, 7)])
def test_a_plain_sequence_has_one_prompt_token(ids: tuple[int, ...]):
    plain = as_sequence(ids, 3)
    assert (plain.prompt_ids, plain.ids, plain.group) == (ids[:1], ids[1:], 3)
    assert all(plain.trained)
    assert len(plain.trained) == len(plain.rollout_logprobs) == len(plain.advantages) == len(ids) - 1
