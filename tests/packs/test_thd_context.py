# SPDX-License-Identifier: Apache-2.0
"""Index maps of packs that context-parallel ranks share, against plain Python."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from offsets import offsets

from megagraph.packs.ops import thd_partition_indices


def zigzag(document_lengths: list[int], tail: int, cp_size: int, cp_rank: int) -> list[int]:
    """The layout in plain Python: deal chunks r and 2 * cp_size - 1 - r of each document to rank r."""
    rows: list[int] = []
    start = 0
    for length in document_lengths:
        document = list(range(start, start + length))
        chunk = length // (2 * cp_size)
        chunks = [document[i * chunk : (i + 1) * chunk] for i in range(2 * cp_size)]
        rows += document if cp_size == 1 else chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]
        start += length
    piece = tail // cp_size
    return rows + list(range(start + cp_rank * piece, start + (cp_rank + 1) * piece))


@settings(max_examples=60)
@given(
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    units=st.lists(st.sampled_from([0, 0, 1, 2, 5, 300]), max_size=7),
    tail_units=st.sampled_from([0, 1, 40]),
    empty_slots=st.integers(0, 4),
)
@example(cp_size=2, units=[], tail_units=0, empty_slots=0)
def test_rows_are_dealt_out_in_zigzag_and_each_exactly_once(
    device: str, cp_size: int, units: list[int], tail_units: int, empty_slots: int
) -> None:
    multiple = 1 if cp_size == 1 else 2 * cp_size
    lengths = [unit * multiple for unit in units] + [0] * empty_slots
    tail = tail_units * cp_size
    total = sum(lengths) + tail
    found = [thd_partition_indices(offsets(lengths, device), total, cp_size, rank) for rank in range(cp_size)]
    assert all(rows.dtype is torch.int32 for rows in found)
    ranks = [rows.tolist() for rows in found]
    assert ranks == [zigzag(lengths, tail, cp_size, rank) for rank in range(cp_size)]
    assert sorted(row for rows in ranks for row in rows) == list(range(total))


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
    to_gathered, to_physical = torch.ops.megagraph.thd_gathered_rows(
        offsets(lengths, device), total, cp_size
    ).tolist()
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
        maps = torch.ops.megagraph.thd_context_keys(offsets(lengths, device), total, cp_size, rank)
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
