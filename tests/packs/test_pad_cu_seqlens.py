# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from torch import Tensor

from megagraph.packs.ops import pad_cu_seqlens

lengths = st.lists(st.sampled_from([0, 1, 2, 7, 100_000]), max_size=9)


@settings(max_examples=60)
@given(lengths=lengths, spare=st.integers(0, 5), end=st.none() | st.integers(1_000_000, 2**31 - 1))
def test_added_offsets_repeat_the_last_one_or_the_physical_end(
    device: str, lengths: list[int], spare: int, end: int | None
) -> None:
    given_offsets = offsets(lengths, device)
    padded = pad_cu_seqlens(given_offsets, len(lengths) + spare, end)
    last = sum(lengths) if end is None else end
    assert padded.tolist() == given_offsets.tolist() + [last] * spare
    assert padded.dtype == torch.int32
    assert padded.device == given_offsets.device
    assert padded.data_ptr() != given_offsets.data_ptr()


def test_more_documents_than_one_block_of_threads(device: str) -> None:
    cu_seqlens = torch.arange(1001, dtype=torch.int32, device=device)
    assert pad_cu_seqlens(cu_seqlens, 3000).tolist() == list(range(1001)) + [1000] * 2000


def test_one_document_more_than_the_capacity_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="the pack holds 4 documents, more than the capacity of 3"):
        pad_cu_seqlens(offsets([1, 2, 3, 4], device), 3)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), r"must be 1-D with at least one entry, got shape \[2, 3\]"),
        (torch.zeros(0, dtype=torch.int32), r"must be 1-D with at least one entry, got shape \[0\]"),
        (torch.zeros(3, dtype=torch.int64), "must be int32, got Long"),
        (torch.zeros(6, dtype=torch.int32)[::2], "must be contiguous"),
    ],
)
def test_other_offsets_are_refused(device: str, cu_seqlens: Tensor, message: str) -> None:
    moved = torch.empty_strided(cu_seqlens.shape, cu_seqlens.stride(), dtype=cu_seqlens.dtype, device=device)
    with pytest.raises(ValueError, match=message):
        pad_cu_seqlens(moved, 8)


@pytest.mark.gpu
def test_host_waits_for_nothing(request: pytest.FixtureRequest) -> None:
    cu_seqlens = offsets([3, 0, 4], "cuda")
    request.getfixturevalue("host_waits_for_nothing")
    pad_cu_seqlens(cu_seqlens, 5, 9)


@pytest.mark.parametrize("end", [None, 9])
def test_opcheck(device: str, end: int | None) -> None:
    torch.library.opcheck(torch.ops.megagraph.pad_cu_seqlens.default, (offsets([3, 0, 4], device), 5, end))


def test_compiles_without_a_graph_break(device: str) -> None:
    compiled = torch.compile(pad_cu_seqlens, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 0, 4], [5], [1, 1, 1, 1], [1, 1, 1, 1, 1]):
        given_offsets = offsets(lengths, device)
        assert torch.equal(compiled(given_offsets, 6, 9), pad_cu_seqlens(given_offsets, 6, 9))
