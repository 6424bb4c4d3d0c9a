# SPDX-License-Identifier: Apache-2.0
"""rope_thd beside Megatron's own unfused path, bit for bit, and by each head alone."""

import gc
import itertools
import weakref
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from rope_cases import frequencies, layouts, tables
from same_bits import assert_same_bits

from megagraph.packs.ops import RopeLayout, RotaryTables, rope_thd

# Of a head, and how many of them are rotated.
HEAD_DIMS = [(8, 8), (16, 8), (64, 32), (12, 6), (6, 2), (16, 16), (64, 64), (128, 128), (256, 256)]


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


@pytest.mark.megatron
@layouts
@pytest.mark.parametrize("cp_size", [1, 4])
@settings(max_examples=20)
@given(
    units=st.lists(st.sampled_from([0, 1, 2, 5, 12]), min_size=1, max_size=5).filter(any),
    tail=st.sampled_from([0, 1, 9]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    head_dims=st.sampled_from(HEAD_DIMS),
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
        t, grad = torch.randn(2, rows + tail, 3, head_dim, device=device).to(dtype).unbind()
        t[rows:] = grad[rows:] = torch.nan
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
            assert torch.equal(found[:rows], wanted) and not found[rows:].any()


@layouts
@pytest.mark.parametrize("dim", [16, 32, 128])
@pytest.mark.parametrize("heads", [(7, 3), (1,), (33, 1, 2), (170,)], ids=str)
def test_many_heads_have_the_bits_of_each(device: str, layout: str, dim: int, heads: tuple[int, ...]) -> None:
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


def test_tables_are_made_once_for_each_frequencies_dtype_and_mscale() -> None:
    tables, both = RotaryTables(), [frequencies(), frequencies()]
    seen: dict[int, tuple[object, ...]] = {}
    keys = list(itertools.product(range(2), (torch.float32, torch.bfloat16), (1.0, 1.2)))
    for index, dtype, mscale in keys * 2:
        cos, sin = tables.tables(both[index], dtype, mscale)
        for table in (cos, sin):
            assert seen.setdefault(id(table), (index, dtype, mscale, table)) == (index, dtype, mscale, table)
    assert len(seen) == 2 * len(keys)
    made = tables.tables(both[0], torch.float32, 1.0)[0]
    tables.rotate(torch.randn(5, 1, 8), both[0], offsets([5]))  # as every layer does
    assert tables.tables(both[0], torch.float32, 1.0)[0] is made
    assert RotaryTables().tables(both[0], torch.float32, 1.0)[0] is not made


def test_views_of_frequencies_share_tables_by_their_place() -> None:
    """Bug: multi-latent attention cuts its table to the rows of its pack in each call, and each such view got
    tables of its own, which a capture made inside of its graph."""
    tables, freqs = RotaryTables(), frequencies()
    made = tables.tables(freqs, torch.float32, 1.0)
    assert tables.tables(freqs[0:32], torch.float32, 1.0)[0] is made[0]
    assert tables.tables(freqs.detach(), torch.float32, 1.0)[0] is made[0]
    for begin, end in ((0, 20), (4, 24), (4, 32)):
        first, again = (tables.tables(freqs[begin:end], torch.float32, 1.0) for _ in range(2))
        assert first[0].data_ptr() == again[0].data_ptr() and torch.equal(first[0], made[0][begin:end])
    dying = weakref.ref(made[0])
    del first, again, made, freqs
    assert dying() is None


def test_views_of_fewer_rows_need_no_tables_of_their_own() -> None:
    """Bug: each length had some, as long as the frequencies, and packs of many lengths filled memory."""
    tables, freqs = RotaryTables(), frequencies()
    for rows in (8, *range(20, 0, -1), 32, *range(1, 33)):
        cos, sin = tables.tables(freqs[:rows], torch.float32, 1.0)
        angles = freqs[:rows].flatten(1)
        assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())
    (pairs,) = (pairs for known in tables._tables.values() for pairs in known.values())
    assert [cos.size(0) for cos, _sin in pairs] == [8, 20, 32]


def test_tables_die_with_the_frequencies_and_keep_nothing_alive() -> None:
    """Neither the frequencies nor the object, whichever of both dies first."""
    tables, freqs, others = RotaryTables(), frequencies(), frequencies()
    kept = tables.tables(others, torch.float32, 1.0)[0]
    dying = [
        weakref.ref(table)
        for dtype in (torch.float32, torch.bfloat16)
        for table in tables.tables(freqs, dtype, 1.0)
    ]
    gc.disable()
    try:
        del freqs
        assert all(table() is None for table in dying)
    finally:
        gc.enable()
    left = weakref.ref(kept), weakref.ref(others), weakref.ref(tables)
    del kept
    assert left[0]() is not None
    del tables
    gc.collect()
    assert left[2]() is None and left[1]() is not None
    del others
    assert left[1]() is None


@pytest.mark.megatron
def test_frequencies_come_once_from_megatrons_embedding_and_so_do_the_tables(rope_utils: ModuleType) -> None:
    """`RotaryEmbedding` caches its result, which is what makes the tables last over layers and steps."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megagraph.demo.cpu import megatron_on_cpu

    group = mock.Mock(size=lambda: 1, rank=lambda: 0)
    with megatron_on_cpu():
        embedding = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)
        first, second = (embedding(32, packed_seq=True, cp_group=group) for _ in range(2))
    tables = RotaryTables()
    once = tables.tables(first, torch.bfloat16, 1.0)
    assert tables.tables(second, torch.bfloat16, 1.0)[0] is once[0]
    assert torch.equal(first.cpu(), frequencies())
