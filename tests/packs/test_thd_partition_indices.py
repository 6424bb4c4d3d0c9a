# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
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


@settings(max_examples=80)
@given(
    cp_size=st.sampled_from([1, 2, 3, 4, 8]),
    units=st.lists(st.sampled_from([0, 0, 1, 2, 5, 300]), max_size=7),
    tail_units=st.sampled_from([0, 1, 40]),
    empty_slots=st.integers(0, 4),
)
def test_rows_are_dealt_out_in_zigzag_and_each_exactly_once(
    device: str, cp_size: int, units: list[int], tail_units: int, empty_slots: int
) -> None:
    multiple = 1 if cp_size == 1 else 2 * cp_size
    lengths = [unit * multiple for unit in units] + [0] * empty_slots
    tail = tail_units * cp_size
    total = sum(lengths) + tail
    ranks = [
        thd_partition_indices(offsets(lengths, device), total, cp_size, rank).tolist()
        for rank in range(cp_size)
    ]
    assert ranks == [zigzag(lengths, tail, cp_size, rank) for rank in range(cp_size)]
    assert sorted(row for rows in ranks for row in rows) == list(range(total))


def test_no_physical_rows(device: str) -> None:
    indices = thd_partition_indices(offsets([], device), 0, 2, 1)
    assert indices.shape == (0,)
    assert indices.dtype == torch.int32


@pytest.mark.parametrize(
    ("total", "cp_size", "cp_rank", "message"),
    [
        (8, 2, 2, "need 0 <= cp_rank < cp_size, got cp_rank 2 and cp_size 2"),
        (8, 2, -1, "need 0 <= cp_rank < cp_size, got cp_rank -1 and cp_size 2"),
        (8, 0, 0, "need 0 <= cp_rank < cp_size, got cp_rank 0 and cp_size 0"),
        (9, 2, 0, "total_tokens 9 is not a multiple of cp_size 2"),
        (2**31, 2, 0, "total_tokens 2147483648 does not fit int32"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    device: str, total: int, cp_size: int, cp_rank: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        thd_partition_indices(offsets([4, 4], device), total, cp_size, cp_rank)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 6, 8], "document 0 has length 6, not a multiple of 2 \\* cp_size = 4"),
        ([0, 8, 4], "document 1 has length -4; offsets must not decrease"),
        ([4, 8], "the first offset must be 0, got 4"),
        ([0, 12], "the last offset 12 is past the 8 physical tokens"),
    ],
)
def test_offsets_that_do_not_fit_are_refused_on_the_cpu(cu_seqlens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thd_partition_indices(torch.tensor(cu_seqlens, dtype=torch.int32), 8, 2, 0)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_opcheck(device: str, cp_size: int) -> None:
    arguments = (offsets([4, 0, 8], device), 16, cp_size, cp_size - 1)
    torch.library.opcheck(torch.ops.megagraph.thd_partition_indices.default, arguments)


def test_compiles_without_a_graph_break(device: str) -> None:
    compiled = torch.compile(thd_partition_indices, fullgraph=True, backend="aot_eager")
    for lengths, total in (([4, 8], 16), ([8], 8), ([4, 4, 4], 24)):
        arguments = (offsets(lengths, device), total, 2, 1)
        assert torch.equal(compiled(*arguments), thd_partition_indices(*arguments))
