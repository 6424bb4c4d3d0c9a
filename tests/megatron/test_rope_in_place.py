# SPDX-License-Identifier: Apache-2.0
"""What runs in place of Megatron's RoPE and kernels, where no bits of a model tell it: test_rope_bits.py."""

from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megagraph._C import mark_canonical
from megagraph.megatron import seams
from megagraph.megatron.patch import inside_layers
from megagraph.megatron.patch.inside_layers import wrap_engine_attention, wrap_foreign_rope, wrap_rope

NAN = float("nan")
ENDS, TOKENS, HEADS, WIDTH = (0, 4, 10), 12, 2, 8  # two rows past the last offset
SCALE = 1.2079
RANKS, ROWS, END = 2, 8, 6  # of a rank, the last two behind the pack's end
COLUMNS = 4
PADDED, PADDED_OFFSETS = [0, 4, 12, 12, 16], ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
ROWS_OF_MLA = [torch.randn(12, heads, width) for heads, width in ((2, 12), (2, 10), (1, 8))]
ANGLES = torch.randn(16, 1, 1, 8), torch.randn(16, 1, 1, 8)
wrap_fused_rope = partial(wrap_foreign_rope, seams.FUSED_ROPE)
wrap_hosts_rope = partial(wrap_foreign_rope, seams.ATTENTION_ROPE)


def group(size: int, rank: int = 0) -> Any:
    """Stands in for one of context-parallel ranks."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def tail(t: Tensor, filler: float) -> Tensor:
    out = torch.zeros_like(t)
    out[ENDS[-1] :] = filler
    return out


@pytest.fixture
def theirs() -> mock.Mock:
    """A function in place of Megatron's: doubles rows, with what a kernel leaves that writes no tail."""
    made = mock.Mock(side_effect=lambda t, *_, **__: t * 2 + tail(t, NAN))
    return wraps(seams.PACKED_ROPE.function())(made)


def canonical(*ends: int) -> Tensor:
    offsets = torch.tensor(ends, dtype=torch.int32)
    names = [f"cu_seqlens_{of}{kind}" for of in ("q", "kv") for kind in ("", "_padded")]
    mark_canonical(SimpleNamespace(**dict.fromkeys(names, offsets)))
    return offsets


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D] that are NaN past the last offset, frequencies, offsets of a canonical pack."""
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(TOKENS, HEADS, WIDTH, generator=generator)
    t[ENDS[-1] :] = NAN
    return t, torch.randn(TOKENS, 1, 1, WIDTH, generator=generator), canonical(*ENDS)


def test_a_pack_as_given_and_a_call_that_asks_for_more_are_megatrons_business(theirs: mock.Mock) -> None:
    alone, (t, freqs, cu_seqlens), given = group(1), operands(), torch.tensor(ENDS, dtype=torch.int32)
    rope, fused, of_a_host = (wrap(theirs) for wrap in (wrap_rope, wrap_fused_rope, wrap_hosts_rope))
    assert rope(t, given, freqs, mscale=SCALE, cp_group=alone)[ENDS[-1] :].isnan().all()
    assert fused(t, given, freqs, 1, 0)[ENDS[-1] :].isnan().all()
    assert of_a_host(t, freqs, None, cu_seqlens=given)[ENDS[-1] :].isnan().all()
    of_a_host(t, freqs, None)
    assert [(call.args[1:], call.kwargs) for call in theirs.call_args_list] == [
        ((given, freqs), {"mscale": SCALE, "cp_group": alone}),
        ((given, freqs, 1, 0), {}),
        ((freqs, None), {"cu_seqlens": given}),
        ((freqs, None), {}),
    ]
    theirs.reset_mock()
    rope(t, cu_seqlens, freqs, False, True, SCALE, alone, more=True)
    (call,) = theirs.call_args_list
    assert call.args[1] is cu_seqlens and [*call.kwargs.values()] == [False, True, SCALE, alone, True]
    rope(t, cu_seqlens, freqs, False, True, SCALE, alone, more=False)
    assert theirs.call_count == 1
    rope(t, cu_seqlens, freqs)  # which says that it wants a group
    assert theirs.call_count == 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("whose", ["the engine's", "a host's"])
def test_a_foreign_rope_has_a_tail_of_zeros_there_and_back(theirs: Any, whose: str, ranks: int) -> None:
    """It leaves rows past the last offset as it finds them. Offsets are those of all ranks."""
    t, freqs, _ = operands()
    cu_seqlens = canonical(*(ranks * end for end in ENDS))
    t.requires_grad_()
    if whose == "a host's":
        wrap, args = wrap_hosts_rope, (freqs, None)
        given = {"cu_seqlens": cu_seqlens, "cp_group": group(ranks)}
    else:
        wrap, args, given = wrap_fused_rope, (cu_seqlens, freqs), {"cp_size": ranks, "cp_rank": 0}
    out = wrap(theirs)(t, *args, **given)
    assert [(call.args[1:], call.kwargs) for call in theirs.call_args_list] == [(args, given)]
    assert torch.equal(out[: ENDS[-1]], 2 * t[: ENDS[-1]]) and not out[ENDS[-1] :].any()
    out.backward(torch.ones_like(out) + tail(out, NAN))
    assert t.grad is not None and torch.equal(t.grad, 2 + tail(t, -2.0))


def test_a_foreign_rope_may_hand_out_rows_in_another_order() -> None:
    """Bug: it raised on canonical packs alone, that its result was not contiguous."""

    def rope(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
        return (2 * t.transpose(0, 1)).contiguous().transpose(0, 1)

    t, freqs, _ = operands()
    out = wrap_fused_rope(rope)(t, canonical(*ENDS), freqs)
    assert torch.equal(out[: ENDS[-1]], 2 * t[: ENDS[-1]]) and not out[ENDS[-1] :].any()


class Attention:
    """Stands in for the engine's, with the ranks that share its packs. Leaves rubbish behind a pack's end."""

    def __init__(self, *groups: Any) -> None:
        self.cp_group = list(groups) or None
        self.packs: list[Any] = []

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, packed_seq_params: Any = None
    ) -> Tensor:
        self.packs.append(packed_seq_params)
        rubbish = torch.where(torch.arange(query.size(0)) < END, 0.0, NAN)
        return query + key + value + rubbish[:, None]


attend = wrap_engine_attention(Attention.forward)


def pack(*, is_canonical: bool = True, **changes: Any) -> Any:
    """Of two documents, both padded, on all ranks."""
    actual, padded = canonical(0, 3, 7, 7), canonical(0, 4, 12, 12)
    if not is_canonical:
        actual, padded = actual.clone(), padded.clone()
    fields = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), actual),
        **dict.fromkeys(PADDED_OFFSETS, padded),
        "pad_between_seqs": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def rows(count: int = ROWS) -> list[Tensor]:
    return [torch.randn(count, COLUMNS, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(
    ("groups", "changes", "padded", "said"),
    [
        ([group(RANKS)], {}, PADDED, True),
        # As many ranks as their product.
        ([group(1), group(RANKS)], {}, PADDED, True),
        # What a pack says of its padding stays.
        ([group(RANKS, 1)], {"pad_between_seqs": True}, PADDED, True),
        ([group(RANKS, 1)], {"pad_between_seqs": False}, PADDED, False),
        # Offsets without padded ones are those of rows.
        ([group(RANKS, 1)], dict.fromkeys(PADDED_OFFSETS), [0, 3, 7, 7, 16], False),
    ],
)
def test_rows_behind_the_end_are_a_document_without_a_valid_token(
    groups: list[Any], changes: dict[str, Any], padded: list[int], said: bool
) -> None:
    attention, given, qkv = Attention(*groups), pack(**changes), rows()
    end = padded[-2] // RANKS
    out = attend(attention, *qkv, None, packed_seq_params=given)
    (seen,) = attention.packs
    assert seen is not given and given.cu_seqlens_q.numel() == 4
    assert seen.cu_seqlens_q.tolist() == seen.cu_seqlens_kv.tolist() == [0, 3, 7, 7, 7]
    assert seen.cu_seqlens_q_padded.tolist() == seen.cu_seqlens_kv_padded.tolist() == padded
    assert seen.pad_between_seqs is said
    assert torch.equal(out[:end], sum(qkv)[:end]) and not out[end:].any()
    out.backward(torch.where(torch.arange(ROWS) < end, 1.0, NAN)[:, None].expand(-1, COLUMNS))
    for tensor in qkv:
        assert tensor.grad is not None
        assert (tensor.grad[:end] == 1).all() and not tensor.grad[end:].any()


@pytest.mark.parametrize("switch", ["NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"])
def test_kernels_of_a_rank_that_may_leave_tails_do_not(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what flash-attn left behind a pack's end went into gradients of weights."""
    monkeypatch.setenv(switch, str(int(switch == "NVTE_FLASH_ATTN")))
    monkeypatch.setattr(inside_layers, "_has_flash_attn", lambda: switch == "NVTE_FLASH_ATTN")
    attention, given, qkv = Attention(), pack(cu_seqlens_q_padded=canonical(0, 4, END)), rows()
    out = attend(attention, *qkv, None, packed_seq_params=given)
    assert attention.packs == [given]
    assert torch.equal(out[:END], sum(qkv)[:END]) and not out[END:].any()
    out.backward(torch.where(torch.arange(ROWS) < END, 1.0, NAN)[:, None].expand(-1, COLUMNS))
    assert not any(it.grad is None or it.grad[END:].any() for it in qkv)


OTHERS: dict[str, tuple[Attention, Any, int]] = {
    "one rank": (Attention(), pack(), ROWS),
    "a group of one rank": (Attention(group(1)), pack(), ROWS),
    "as it was given": (Attention(group(RANKS)), pack(is_canonical=False), ROWS),
    "no pack": (Attention(group(RANKS)), None, ROWS),
    "rows that are not two parts": (Attention(group(RANKS)), pack(), ROWS + 1),
}


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_call_is_the_engines_own_business(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    attention, given, count = OTHERS[case]
    out = attend(attention, *rows(count), None, packed_seq_params=given)
    assert attention.packs == [given] and out[END:].isnan().all()


def rotated(offsets: Tensor | None, **further: Any) -> list[Callable[[], Any]]:
    """The rotation of queries, and that of keys and values, where Megatron's functions raise."""
    query, kv, k_pe = (rows.clone() for rows in ROWS_OF_MLA)
    of_query, of_keys = (
        inside_layers.wrap_mla_rope(it, wraps(it.function())(mock.Mock(side_effect=ArithmeticError)))
        for it in (seams.MLA_QUERY_ROPE, seams.MLA_KEY_ROPE)
    )
    return [
        lambda: [of_query(query, *ANGLES, 4, 8, offsets, **further)],
        lambda: of_keys(kv, k_pe, *ANGLES, 8, 4, 6, offsets, **further),
    ]


def test_everything_else_is_megatrons() -> None:
    """No pack, one as it was given, and interleaved."""
    given = torch.tensor([0, 4, 8], dtype=torch.int32)
    for rotate in (*rotated(None), *rotated(given), *rotated(canonical(0, 4, 8), rotary_interleaved=True)):
        with pytest.raises(ArithmeticError):
            rotate()
