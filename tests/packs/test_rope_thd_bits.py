# SPDX-License-Identifier: Apache-2.0
"""rope_thd against Megatron's own unfused path, bit for bit."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from rope_cases import Rank, frequencies, layouts, tables, without_empty_documents

from megagraph.packs.ops import rope_thd


@pytest.mark.megatron
@layouts
@pytest.mark.parametrize("cp_size", [1, 2, 4])
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
    layout: str,
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
            without_empty_documents(lengths, device),
            freqs,
            layout == "interleaved",
            layout == "mla_interleaved",
            mscale=mscale,
            cp_group=Rank(cp_size=cp_size, cp_rank=cp_rank),
        )
        expected.backward(grad[:rows])

        ours = t.requires_grad_()
        (actual,) = rope_thd(
            [ours], *tables(freqs, dtype, mscale), cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, layout=layout
        )
        actual.backward(grad)

        assert ours.grad is not None
        assert torch.equal(actual[:rows], expected)
        assert torch.equal(ours.grad[:rows], theirs.grad)
        assert torch.equal(actual[rows:], torch.zeros_like(actual[rows:]))
        assert torch.equal(ours.grad[rows:], torch.zeros_like(actual[rows:]))


@layouts
@pytest.mark.parametrize("dim", [16, 32, 128])
@pytest.mark.parametrize("heads", [(7, 3), (1,), (33, 1, 2), (170,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_of_any_number_have_the_bits_of_each_head_alone(
    device: str, layout: str, dim: int, heads: tuple[int, ...], dtype: torch.dtype
) -> None:
    """All tensors in one call against one head a call on the CPU, forward and backward."""
    lengths = [5, 0, 11]
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
