# SPDX-License-Identifier: Apache-2.0
"""Index maps of packs that context-parallel ranks share, against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from test_thd_partition_indices import zigzag

from megagraph.packs.ops import thd_context_keys, thd_gathered_rows

PACKS = {
    "cp_size": st.sampled_from([2, 3, 4, 8]),
    "units": st.lists(st.sampled_from([0, 0, 1, 2, 5, 60]), max_size=7),
    "tail_units": st.sampled_from([0, 1, 40]),
}


@settings(max_examples=60)
@given(**PACKS)
def test_gathered_rows_and_rows_of_documents_are_mapped_both_ways(
    device: str, cp_size: int, units: list[int], tail_units: int
) -> None:
    lengths, tail = [unit * 2 * cp_size for unit in units], tail_units * cp_size
    total = sum(lengths) + tail
    gathered = [row for rank in range(cp_size) for row in zigzag(lengths, tail, cp_size, rank)]
    to_gathered, to_physical = thd_gathered_rows(offsets(lengths, device), total, cp_size).tolist()
    assert to_physical == gathered
    assert [gathered[row] for row in to_gathered] == list(range(total))


@settings(max_examples=60)
@given(**PACKS)
def test_each_chunk_sees_its_document_up_to_its_end(
    device: str, cp_size: int, units: list[int], tail_units: int
) -> None:
    lengths, tail = [unit * 2 * cp_size for unit in units], tail_units * 2 * cp_size
    total = sum(lengths) + tail
    gathered = [row for rank in range(cp_size) for row in zigzag(lengths, tail, cp_size, rank)]
    for rank in range(cp_size):
        maps = thd_context_keys(offsets(lengths, device), total, cp_size, rank)
        queries, seen, keys, places = (found.tolist() for found in maps)
        local = zigzag(lengths, tail, cp_size, rank)
        expected, start = [], 0
        for document, length in enumerate(lengths):
            chunk = length // (2 * cp_size)
            for half, at in enumerate((rank, 2 * cp_size - 1 - rank)):
                index = 2 * document + half
                assert local[queries[index] : queries[index + 1]] == list(
                    range(start + at * chunk, start + (at + 1) * chunk)
                )
                assert seen[index] == len(expected)
                expected += range(start, start + (at + 1) * chunk)
            start += length
        assert (queries[-1], seen[-1]) == (len(local) - tail // cp_size, len(expected))
        assert [gathered[row] for row in keys[: len(expected)]] == expected
        assert all(0 <= row < total for row in keys) and len(keys) == total // (2 * cp_size) * (
            2 * cp_size + 1
        )
        # Each place leads back to its row, and each key is the place of one row of one chunk.
        for row, found in enumerate(zip(*places, strict=True)):
            assert all(keys[place] == row for place in found if place < len(keys))
        used = [place for of_chunk in places for place in of_chunk if place < len(keys)]
        assert sorted(used) == list(range(len(expected)))


@settings(max_examples=30)
@given(cp_size=PACKS["cp_size"], units=PACKS["units"])
def test_every_rank_multiplies_as_much(cp_size: int, units: list[int]) -> None:
    """Pairs of a query and a key that it sees, and keys that are laid out; and no pair twice."""
    lengths = [unit * 2 * cp_size for unit in units]
    work = []
    for rank in range(cp_size):
        queries, seen, *_ = thd_context_keys(offsets(lengths, "cpu"), sum(lengths), cp_size, rank)
        rows, keys = queries.long().diff(), seen.long().diff()
        pairs = rows * keys - rows * (rows - 1) // 2  # the last query sees all keys, others one less each
        work.append((int(pairs.sum()), int(keys.sum())))
    assert len(set(work)) == 1
    assert sum(pairs for pairs, _ in work) == sum(length * (length + 1) // 2 for length in lengths)


@pytest.mark.gpu
def test_neither_waits_for_the_device(request: pytest.FixtureRequest) -> None:
    cu_seqlens = offsets([8, 0, 16], "cuda")
    request.getfixturevalue("host_waits_for_nothing")
    thd_gathered_rows(cu_seqlens, 32, 4)
    thd_context_keys(cu_seqlens, 32, 4, 3)


def test_opcheck(device: str) -> None:
    cu_seqlens = offsets([8, 0, 16], device)
    for op, arguments in (("thd_gathered_rows", (32, 4)), ("thd_context_keys", (32, 4, 1))):
        torch.library.opcheck(getattr(torch.ops.megagraph, op).default, (cu_seqlens, *arguments))


@pytest.mark.parametrize(
    ("lengths", "total", "cp_size", "message"),
    [
        ([8], 8, 1, "expected several ranks, got cp_size 1"),
        ([8], 9, 2, "total_tokens 9 is not a multiple of"),
        ([8], 8, 0, "got cp_rank 0 and cp_size 0"),
    ],
)
def test_bad_sizes_are_named(device: str, lengths: list[int], total: int, cp_size: int, message: str) -> None:
    for call in (thd_gathered_rows, lambda *given: thd_context_keys(*given, 0)):
        with pytest.raises(ValueError, match=message):
            call(offsets(lengths, device), total, cp_size)


def test_offsets_that_cannot_be_cut_are_named() -> None:
    """On a GPU they stay on the device, unread."""
    for call in (thd_gathered_rows, lambda *given: thd_context_keys(*given, 1)):
        with pytest.raises(ValueError, match="length 6, not a multiple of 2 \\* cp_size = 4"):
            call(offsets([6], "cpu"), 8, 2)


def test_a_rank_that_is_none_is_named(device: str) -> None:
    with pytest.raises(ValueError, match="got cp_rank 2 and cp_size 2"):
        thd_context_keys(offsets([8], device), 8, 2, 2)
