# SPDX-License-Identifier: Apache-2.0
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets

from megagraph import _C as _C  # registers the ops

pad_cu_seqlens = torch.ops.megagraph.pad_cu_seqlens
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
