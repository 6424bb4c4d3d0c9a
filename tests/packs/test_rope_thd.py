# SPDX-License-Identifier: Apache-2.0
"""rope_thd beside Megatron's own unfused path, bit for bit, and by each head alone."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from rope_cases import frequencies, layouts, tables
from same_bits import assert_same_bits
from torch import Tensor

from megagraph.packs.ops import RopeLayout, rope_thd
from megagraph.packs.rope import RotaryTables


@layouts
def test_strided_views_turn_like_their_copies(device: str, layout: str) -> None:
    fused = torch.randn(12, 4, 24, device=device, dtype=torch.bfloat16)
    views = [fused[..., :8], fused[:, ::2, 8:16], fused[..., 3:11], fused.transpose(1, 2)[:, 2:12, :2]]
    views[3] = views[3].transpose(1, 2)
    cos, sin = tables(frequencies(12, 8, layout, device), fused.dtype)
    cu_seqlens = offsets([7, 3], device)
    for view, turned in zip(views, rope_thd(views, cos, sin, cu_seqlens, layout=layout), strict=True):
        assert turned.is_contiguous()
        (expected,) = rope_thd([view.contiguous()], cos, sin, cu_seqlens, layout=layout)
        assert torch.equal(turned, expected)


def test_gradients_that_are_expanded_or_of_nothing_are_read_right(device: str) -> None:
    cos, sin = tables(frequencies(8, 4, "neox", device), torch.float32)
    q, k = (torch.randn(6, 2, 4, device=device, requires_grad=True) for _ in range(2))
    out, _unused = rope_thd([q, k], cos, sin, offsets([5], device))
    expanded = torch.autograd.grad(out.sum(), (q, k), retain_graph=True)
    dense = torch.autograd.grad(out, (q, k), torch.ones_like(out))
    assert_same_bits(expanded, dense)
    assert not expanded[1].any()


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 4)])
def test_no_rows_no_heads_no_documents(device: str, shape: tuple[int, int, int]) -> None:
    cos, sin = tables(frequencies(8, 4, "neox", device), torch.float32)
    (out,) = rope_thd([torch.randn(shape, device=device)], cos, sin, offsets([], device))
    assert torch.equal(out, torch.zeros(shape, device=device))


@layouts
@pytest.mark.parametrize("cp_size", [1, 2])
def test_gradcheck(device: str, layout: str, cp_size: int) -> None:
    cos, sin = tables(frequencies(16, 4, layout, device), torch.float64, mscale=1.3)
    q = torch.randn(8, 2, 6, device=device, dtype=torch.float64, requires_grad=True)
    k = torch.randn(8, 1, 4, device=device, dtype=torch.float64, requires_grad=True)
    cu_seqlens = offsets([4, 0, 8] if cp_size == 2 else [4, 0, 2], device)

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        options = {"layout": layout}
        return rope_thd([q, k], cos, sin, cu_seqlens, cp_size=cp_size, cp_rank=cp_size - 1, **options)

    assert torch.autograd.gradcheck(turn, (q, k))


@pytest.mark.megatron
@layouts
@pytest.mark.parametrize("cp_size", [1, 4])
@settings(max_examples=15)
@given(
    units=st.lists(st.sampled_from([0, 1, 2, 5, 12]), min_size=1, max_size=5).filter(any),
    tail=st.sampled_from([0, 1, 9]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    head_dims=st.sampled_from(
        [*((8, 8), (16, 8), (64, 32), (12, 6), (6, 2)), *((16, 16), (64, 64), (128, 128), (256, 256))]
    ),
    mscale=st.sampled_from([1.0, 1.2079]),
)
def test_bits_of_megatrons_unfused_path(
    rope_utils: ModuleType,
    device: str,
    layout: RopeLayout,
    cp_size: int,
    units: list[int],
    tail: int,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    mscale: float,
) -> None:
    """Forward and backward, on every rank, over full and partial rotary dimensions."""
    head_dim, rotary_dim = head_dims
    lengths = [unit * 2 * cp_size for unit in units]
    rows = sum(lengths) // cp_size
    # Longer than the pack: Megatron reads a table of just that length as one entry per token.
    freqs = frequencies(sum(lengths) + 1, rotary_dim, layout, device)
    cu_seqlens = offsets(lengths, device)
    for cp_rank in range(cp_size):
        t = torch.randn(rows + tail, 3, head_dim, device=device).to(dtype)
        grad = torch.randn_like(t)
        t[rows:] = torch.nan
        grad[rows:] = torch.nan

        theirs = t[:rows].clone().requires_grad_()
        expected = rope_utils._apply_rotary_pos_emb_thd(
            theirs,
            # Release 0.19 cannot reshape an empty document in the interleaved layout.
            offsets([length for length in lengths if length], device),
            freqs,
            layout == "interleaved",
            layout == "mla_interleaved",
            mscale=mscale,
            cp_group=SimpleNamespace(size=lambda: cp_size, rank=lambda cp_rank=cp_rank: cp_rank),
        )
        expected.backward(grad[:rows])

        ours = t.requires_grad_()
        rank = {"cp_size": cp_size, "cp_rank": cp_rank}
        actual = RotaryTables().rotate(ours, freqs, cu_seqlens, layout=layout, mscale=mscale, **rank)
        actual.backward(grad)

        for found, wanted in ((actual, expected), (ours.grad, theirs.grad)):
            assert torch.equal(found[:rows], wanted)
            assert torch.equal(found[rows:], torch.zeros_like(found[rows:]))


@layouts
@pytest.mark.parametrize("dim", [16, 32, 128])
@pytest.mark.parametrize("heads", [(7, 3), (1,), (33, 1, 2), (170,)], ids=str)
def test_heads_of_any_number_have_the_bits_of_each_head_alone(
    device: str, layout: str, dim: int, heads: tuple[int, ...]
) -> None:
    """All tensors in one call against one head a call on the CPU, forward and backward."""
    lengths, dtype = [5, 0, 11], torch.bfloat16
    cos, sin = tables(frequencies(16, dim, layout, "cpu"), dtype)
    inputs = [torch.randn(19, count, dim).to(dtype) for count in heads]
    grads = [torch.randn_like(t) for t in inputs]

    def turned(tensors: list[torch.Tensor], gradients: list[torch.Tensor], where: str) -> list[torch.Tensor]:
        leaves = [t.to(where, copy=True).requires_grad_() for t in tensors]
        out = rope_thd(leaves, cos.to(where), sin.to(where), offsets(lengths, where), layout=layout)
        torch.autograd.backward(out, [grad.to(where) for grad in gradients])
        return [t.detach().cpu() for pair in zip(out, leaves, strict=True) for t in (pair[0], pair[1].grad)]

    together = turned(inputs, grads, device)
    for t, grad, out, input_grad in zip(inputs, grads, together[::2], together[1::2], strict=True):
        for head in range(0, t.size(1), 13):
            alone, alone_grad = turned([t[:, head : head + 1]], [grad[:, head : head + 1]], "cpu")
            assert torch.equal(out[:, head : head + 1], alone)
            assert torch.equal(input_grad[:, head : head + 1], alone_grad)
