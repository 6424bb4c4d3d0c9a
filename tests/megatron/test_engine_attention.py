# SPDX-License-Identifier: Apache-2.0
"""What Transformer Engine's attention is given where ranks share packs, and what is left of its answer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_rope_in_place import NAN, Rank, canonical
from torch import Tensor

from megagraph.megatron.patch.inside_layers import wrap_engine_attention

RANKS, ROWS, END = 2, 8, 6  # of a rank, the last two behind the pack's end
WIDTH = 4


class Attention:
    """Stands in for the engine's, with the ranks that share its packs. Leaves rubbish behind a pack's end."""

    def __init__(self, *groups: Any) -> None:
        self.cp_group = list(groups) or None
        self.packs: list[Any] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        self.packs.append(packed_seq_params)
        out = query + key + value
        out = out + torch.where(torch.arange(out.size(0)) < END, 0.0, NAN)[:, None]
        return out


attend = wrap_engine_attention(Attention.forward)


def pack(*, is_canonical: bool = True, **changes: Any) -> Any:
    """Of two documents, both padded, on all ranks."""
    actual, padded = canonical(0, 3, 7, 7), canonical(0, 4, 12, 12)
    if not is_canonical:
        actual, padded = actual.clone(), padded.clone()
    fields = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), actual),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded),
        "pad_between_seqs": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def rows(count: int = ROWS) -> list[Tensor]:
    return [torch.randn(count, WIDTH, requires_grad=True) for _ in range(3)]


def test_rows_behind_the_end_are_a_document_without_a_valid_token() -> None:
    attention, given, qkv = Attention(Rank(RANKS, 0)), pack(), rows()
    out = attend(attention, *qkv, None, packed_seq_params=given)
    (seen,) = attention.packs
    assert seen is not given and given.cu_seqlens_q.numel() == 4
    assert seen.cu_seqlens_q.tolist() == seen.cu_seqlens_kv.tolist() == [0, 3, 7, 7, 7]
    assert seen.cu_seqlens_q_padded.tolist() == seen.cu_seqlens_kv_padded.tolist() == [0, 4, 12, 12, 16]
    assert seen.pad_between_seqs is True
    assert torch.equal(out[:END], sum(qkv)[:END]) and not out[END:].any()
    out.backward(torch.where(torch.arange(ROWS) < END, 1.0, NAN)[:, None].expand(-1, WIDTH))
    for tensor in qkv:
        assert tensor.grad is not None
        assert (tensor.grad[:END] == 1).all() and not tensor.grad[END:].any()


@pytest.mark.parametrize("said", [True, False])
def test_what_a_pack_says_of_its_padding_stays(said: bool) -> None:
    attention = Attention(Rank(RANKS, 1))
    attend(attention, *rows(), None, packed_seq_params=pack(pad_between_seqs=said))
    assert attention.packs[0].pad_between_seqs is said


def test_offsets_without_padded_ones_are_those_of_rows() -> None:
    attention = Attention(Rank(RANKS, 0))
    without = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"))
    attend(attention, *rows(), None, packed_seq_params=pack(**without))
    (seen,) = attention.packs
    assert seen.cu_seqlens_q.tolist() == [0, 3, 7, 7, 7] and seen.pad_between_seqs is False
    assert seen.cu_seqlens_q_padded.tolist() == [0, 3, 7, 7, 16]


OTHERS: dict[str, tuple[Attention, Any, int]] = {
    "one rank": (Attention(), pack(), ROWS),
    "a group of one rank": (Attention(Rank(1, 0)), pack(), ROWS),
    "as it was given": (Attention(Rank(RANKS, 0)), pack(is_canonical=False), ROWS),
    "no pack": (Attention(Rank(RANKS, 0)), None, ROWS),
    "rows that are not two parts": (Attention(Rank(RANKS, 0)), pack(), ROWS + 1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_call_is_the_engines_own_business(case: str) -> None:
    attention, given, count = OTHERS[case]
    out = attend(attention, *rows(count), None, packed_seq_params=given)
    assert attention.packs == [given] and out[END:].isnan().all()


def test_two_nested_groups_are_as_many_ranks_as_their_product() -> None:
    attention = Attention(Rank(1, 0), Rank(RANKS, 0))
    out = attend(attention, *rows(), None, packed_seq_params=pack())
    assert attention.packs[0].cu_seqlens_q.numel() == 5 and not out[END:].any()
