# SPDX-License-Identifier: Apache-2.0
"""rope_mla: bits of its roundings, gradients, tails, context parallelism, refusals. And rope_thd, bit for bit
beside Megatron's own unfused path, and by each head alone."""

import gc
import itertools
import operator
import weakref
from functools import reduce
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor

from megagraph.packs.ops import RopeLayout, RotaryTables, rope_mla, rope_thd

# To the arguments of the op itself.
LAYOUTS: dict[RopeLayout, dict[str, bool]] = {
    "neox": {},
    "interleaved": {"interleaved": True},
    "mla_interleaved": {"mla_interleaved": True},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def frequencies(positions: int = 32, rotary: int = 8, layout: str = "neox", device: str = "cpu") -> Tensor:
    """Angles as Megatron's RotaryEmbedding makes them, [positions, 1, 1, rotary] in float32."""
    inverse = 1.0 / 10000 ** (torch.arange(0, rotary, 2, device=device) / rotary)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float32), inverse)
    wide = angles.repeat_interleave(2, 1) if layout == "interleaved" else angles.repeat(1, 2)
    return wide[:, None, None, :]


def tables(freqs: Tensor, dtype: torch.dtype, mscale: float = 1.0) -> tuple[Tensor, Tensor]:
    flat = freqs.flatten(1)
    return (flat.cos() * mscale).to(dtype), (flat.sin() * mscale).to(dtype)


MSCALE = 1.2079
# heads, content, rotary and value dimensions
SHAPES = [(3, 4, 8, 6), (1, 16, 16, 16), (5, 8, 2, 0), (2, 0, 16, 8), (16, 128, 64, 128), (7, 64, 32, 64)]
SHAPES += [(3, 5, 130, 7), (2, 8, 256, 8)]  # of which a warp holds parts of a head
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Shape = tuple[int, int, int, int]


def inputs(shape: Shape, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, kv and k_pe as attention has them: views of projections' outputs."""
    heads, content, rotary, value = shape
    dims = content + rotary, content + value
    q, kv = (torch.randn(rows, heads * dim, device=device).to(dtype).view(rows, heads, dim) for dim in dims)
    return q, kv, torch.randn(rows, 16 + rotary, device=device).to(dtype)[:, 16:].unsqueeze(1)


def small(device: str) -> tuple[Tensor, ...]:
    """Tables of 8 positions, and offsets of a pack of 5 rows."""
    return (*tables(frequencies(8, 8, "mla_interleaved", device), torch.float32), offsets([5], device))


def run(q: Tensor, kv: Tensor, k_pe: Tensor, grads: Any, *how: Any, **options: Any) -> list[Tensor]:
    """q, k and v, then the gradients of q, kv and k_pe."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, kv, k_pe)]
    # A copy that keeps its strides is what gets written.
    out = rope_mla(leaves[0] * 1, leaves[1], leaves[2], how, **options)
    return [*(t.detach() for t in out), *torch.autograd.grad(out, leaves, grads)]


def random_grads(shape: Shape, rows: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    heads, content, rotary, value = shape
    dims = (content + rotary, content + rotary, value)
    return [torch.randn(rows, heads, dim, device=device).to(dtype) for dim in dims]


_BITS = {torch.bfloat16: (8, -125), torch.float16: (11, -13), torch.float32: (24, -125)}


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 to the nearest number of a type, to even if there are two, without a rounding between."""
    bits, least = _BITS[dtype]
    exponent = torch.frexp(exact).exponent.clamp(min=least)
    return torch.ldexp(torch.round(torch.ldexp(exact, bits - exponent)), exponent - bits)


def fused_reference(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    """One rounding for the second member's product, one for the sum. [T, H, R] with tables [T, 1, R]."""
    dtype, half = x.dtype, x.size(-1) // 2
    x, cos, sin = x.double(), cos.double(), sin.double()
    first, second = (x[..., :half], x[..., half:]) if backward else (x[..., ::2], x[..., 1::2])
    (cos_first, cos_second), (sin_first, sin_second) = (t.split(half, -1) for t in (cos, sin))
    if backward:
        one = first * cos_first + rounded(second * sin_second, dtype)
        other = -first * sin_first + rounded(second * cos_second, dtype)
    else:
        one = first * cos_first - rounded(second * sin_first, dtype)
        other = first * sin_second + rounded(second * cos_second, dtype)
    pair = rounded(one, dtype).to(dtype), rounded(other, dtype).to(dtype)
    return torch.stack(pair, -1).flatten(-2) if backward else torch.cat(pair, -1)


@pytest.mark.parametrize("cp_size", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_fused_roundings(device: str, shape: Shape, dtype: torch.dtype, cp_size: int) -> None:
    heads, content, rotary, value = shape
    lengths = [unit * 2 * cp_size for unit in (3, 0, 7, 1)]
    rows = sum(lengths) // cp_size
    cos, sin = tables(frequencies(64, rotary, "mla_interleaved", device), dtype, MSCALE)
    positions = torch.arange(64, device=device, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()
    for cp_rank in range(cp_size):
        rank = {"cp_size": cp_size, "cp_rank": cp_rank}
        ones = torch.ones(rows, 1, 2, device=device, dtype=torch.float64)
        turned = positions, torch.zeros_like(positions), offsets(lengths, device)
        (at,) = rope_thd([ones], *turned, layout="neox", **rank)
        c, s = (table[at[:, 0, 0].long()][:, None] for table in (cos, sin))
        # Few bits, so that float64 holds every sum of float32.
        all_rows = [t.bfloat16().to(dtype) for t in inputs(shape, rows + 2, dtype, device)]
        grads = [t.bfloat16().to(dtype) for t in random_grads(shape, rows + 2, dtype, device)]
        for t in (*all_rows, *grads):
            t[rows:] = torch.nan
        q, kv, k_pe = (t[:rows] for t in all_rows)
        dq, dk, dv = (t[:rows] for t in grads)
        key = fused_reference(k_pe, c, s, backward=False).expand(-1, heads, -1)
        summed = reduce(torch.add, dk[..., content:].float().split(1, 1))  # over heads, in their order
        expected = [
            torch.cat((q[..., :content], fused_reference(q[..., content:], c, s, backward=False)), -1),
            torch.cat((kv[..., :content], key), -1),
            kv[..., content:],
            torch.cat((dq[..., :content], fused_reference(dq[..., content:], c, s, backward=True)), -1),
            torch.cat((dk[..., :content], dv), -1),
            fused_reference(summed.to(dtype), c, s, backward=True),
        ]
        actual = run(*all_rows, grads, cos, sin, offsets(lengths, device), v_dim=value, **rank)
        for ours, theirs in zip(actual, expected, strict=True):
            end = theirs.size(0)
            assert torch.equal(ours[:end], theirs) and not ours[end:].any()


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [(torch.bfloat16, 1 + 2**-4, 1 + 2**-4), (torch.float16, 1 + 2**-5, 1 + 2**-6)],
    ids=["bfloat16", "float16"],
)
def test_a_fused_sum_is_rounded_once(device: str, dtype: torch.dtype, one: float, other: float) -> None:
    """The product lies half-way between two numbers, and what decides is lost beside it in a float64."""
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    below, above = one * other - eps / 2, one * other + eps / 2
    for small, wanted in ((tiny, above), (0.0, below), (-tiny, below)):
        q = torch.tensor([[[one, 1.0]]], dtype=dtype, device=device)
        cos = torch.tensor([[other, 0.0]], dtype=dtype, device=device)
        sin = torch.tensor([[-small, 0.0]], dtype=dtype, device=device)
        (out,) = rope_mla(q, None, None, (cos, sin, offsets([1], device)))
        assert out[0, 0, 0].item() == wanted


def test_gradcheck(device: str) -> None:
    cos, sin = tables(frequencies(16, 8, "mla_interleaved", device), torch.float64, MSCALE)
    leaves = [
        torch.randn(9, heads, dim, device=device, dtype=torch.float64, requires_grad=True)
        for heads, dim in ((3, 12), (2, 10), (1, 8))
    ]
    how = cos, sin, offsets([4, 0, 3], device)
    assert torch.autograd.gradcheck(lambda q, *keys: rope_mla(q * 1, *keys, how, v_dim=6), leaves)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_has_the_bits_of_two(device: str, shape: Shape) -> None:
    freqs = frequencies(16, shape[2], "mla_interleaved", device)
    how = (*tables(freqs, torch.bfloat16), offsets([5, 11], device))
    q, kv, k_pe = inputs(shape, 19, torch.bfloat16, device)
    grads = dq, dk, dv = random_grads(shape, 19, torch.bfloat16, device)
    together = run(q, kv, k_pe, grads, *how, v_dim=shape[3])
    leaf = q.detach().clone().requires_grad_()
    (query,) = rope_mla(leaf * 1, None, None, how)
    query.backward(dq)
    key, value = rope_mla(None, kv, k_pe, how, v_dim=shape[3])
    made = torch.ops.megagraph.rope_mla_backward(None, dk, dv, *how)
    assert_same_bits(together, [query, key, value, leaf.grad, *made])


def test_queries_are_written_where_they_are_and_gradients_are_not(device: str) -> None:
    how = small(device)
    leaf = torch.randn(7, 2, 12, device=device, requires_grad=True)
    q = leaf * 1
    before = q.detach().clone()
    squared = q.square()
    (query,) = rope_mla(q, None, None, how)
    assert query.data_ptr() == q.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    assert torch.equal(q[:5, :, :4], before[:5, :, :4]) and not torch.equal(q[1:5], before[1:5])
    grad = torch.randn_like(query)
    given_grad = grad.clone()
    first, second = (torch.autograd.grad(query, leaf, grad, retain_graph=True) for _ in range(2))
    assert torch.equal(grad, given_grad) and torch.equal(first[0], second[0])


@pytest.mark.parametrize(("rows", "heads"), [(0, 2), (3, 0), (3, 2)])
def test_no_rows_no_heads_no_documents(device: str, rows: int, heads: int) -> None:
    how = (*small(device)[:2], offsets([], device))
    all_rows = inputs((heads, 4, 8, 4), rows, torch.float32, device)
    grads = [torch.randn(rows, heads, dim, device=device) for dim in (12, 12, 4)]
    assert not any(out.any() for out in run(*all_rows, grads, *how, v_dim=4))
    assert_same_bits(rope_thd(grads[:1], *how), [torch.zeros_like(grads[0])])


@pytest.mark.parametrize("op", ["rope_mla", "rope_thd"])
def test_gradients_that_are_no_rows_of_memory(device: str, op: str) -> None:
    """Expanded, transposed, and of outputs that nothing was made of."""
    *leaves, how = *(torch.randn(6, n, 8, device=device, requires_grad=True) for n in (2, 1)), small(device)
    out, _unused = rope_thd(leaves, *how) if op == "rope_thd" else rope_mla(None, *leaves, how, v_dim=4)
    transposed = torch.randn(*reversed(out.shape), device=device).permute(2, 1, 0)
    for grad in (torch.ones((), device=device).expand_as(out), transposed):
        grads = [grad, grad.contiguous()]
        found, expected = (torch.autograd.grad(out, leaves, it, retain_graph=True) for it in grads)
        assert_same_bits(found, expected)
        assert op == "rope_mla" or not found[1].any()


@pytest.mark.parametrize("name", ["q", "kv", "k_pe"])
def test_the_op_itself_refuses_what_requires_grad(device: str, name: str) -> None:
    given = dict(zip(("q", "kv", "k_pe"), inputs((2, 4, 8, 4), 6, torch.float32, device), strict=True))
    given[name].requires_grad_()
    given |= dict.fromkeys(("kv", "k_pe") if name == "q" else ("q",))
    before, arguments = given[name].detach().clone(), (*given.values(), *small(device))
    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.ops.megagraph.rope_mla_(*arguments, v_dim=4)
    assert torch.equal(given[name], before)
    with torch.no_grad():
        torch.ops.megagraph.rope_mla_(*arguments, v_dim=4)


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("shape", "dtype", "cp_size"),
    [
        *itertools.product([(16, 128, 64, 128), (1, 64, 32, 64)], DTYPES, [1, 4]),
        # Of the largest model that is trained; theirs take half a minute to compile.
        *(((128, 128, 64, 128), torch.bfloat16, cp_size) for cp_size in (1, 4)),
    ],
    ids=str,
)
def test_bits_of_fused_kernels(fused_kernels: Any, shape: Shape, dtype: torch.dtype, cp_size: int) -> None:
    """Theirs must not get a tail, nor heads that are no power of two: blocks of them run over."""
    _heads, content, rotary, value = shape
    for seed, lengths in enumerate(([40, 8, 120, 64], [1024], [8] * 17, [16, 0, 240, 0])):
        torch.manual_seed(seed)
        rows = sum(lengths) // cp_size
        cos, sin = tables(frequencies(1100, rotary, "mla_interleaved", "cuda"), dtype, MSCALE)
        cu_seqlens = offsets(lengths, "cuda")
        for cp_rank in range(cp_size):
            all_rows = inputs(shape, rows, dtype, "cuda")
            grads = random_grads(shape, rows, dtype, "cuda")
            q, kv, k_pe = (t.detach().clone().requires_grad_() for t in all_rows)
            wide, rank = [table[:, None, None] for table in (cos, sin)], (cu_seqlens, cp_rank, cp_size)
            query = fused_kernels.fused_apply_mla_rope_for_q(q * 1, *wide, content, rotary, *rank)
            made = fused_kernels.fused_apply_mla_rope_for_kv(kv, k_pe, *wide, rotary, content, value, *rank)
            out = (query, *made)
            theirs_grads = torch.autograd.grad(out, (q, kv, k_pe), [grad.clone() for grad in grads])
            options = {"v_dim": value, "cp_size": cp_size, "cp_rank": cp_rank}
            ours = run(*all_rows, grads, cos, sin, cu_seqlens, **options)
            assert_same_bits(ours, [*out, *theirs_grads], f"{lengths}, rank {cp_rank}")


# -- rope_thd --------------------------------------------------------------------------------------

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


@pytest.mark.megatron
@layouts
@pytest.mark.parametrize("cp_size", [1, 4])
@settings(max_examples=20)
@given(
    units=st.lists(st.sampled_from([0, 1, 2, 5, 12]), min_size=1, max_size=5).filter(any),
    tail=st.sampled_from([0, 1, 9]),
    of=st.tuples(*map(st.sampled_from, (HEAD_DIMS, [*DTYPES, torch.float64], [1.0, MSCALE]))),
)
def test_bits_of_megatrons_unfused_path(
    rope_utils: Any, device: str, layout: RopeLayout, cp_size: int, units: list[int], tail: int, of: Any
) -> None:
    """Forward and backward, on every rank, over full and partial rotary dimensions."""
    (head_dim, rotary_dim), dtype, mscale = of
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
        how = {"cp_size": cp_size, "cp_rank": cp_rank, "layout": layout}
        (actual,) = rope_thd([ours], *RotaryTables().tables(freqs, dtype, mscale), cu_seqlens, **how)
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

    def turned(tensors: list[Tensor], gradients: list[Tensor], where: str) -> list[Tensor]:
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
    keys = [*itertools.product(range(2), (torch.float32, torch.bfloat16), (1.0, 1.2))]
    once, again = ([it for index, *of in keys for it in tables.tables(both[index], *of)] for _ in range(2))
    assert all(map(operator.is_, once, again)) and len({*map(id, once)}) == 2 * len(keys)
    assert RotaryTables().tables(both[0], torch.float32, 1.0)[0] is not once[0]


def test_views_of_frequencies_share_tables_by_their_place() -> None:
    """Bug: each view that multi-latent attention cuts for its pack got its own, made inside of a graph."""
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
    assert [cos.size(0) for _writes, cos, _sin in pairs] == [8, 20, 32]


def test_tables_follow_frequencies_that_are_written_and_serve_training_after_an_evaluation() -> None:
    """Bug: a buffer that a checkpoint had filled was rotated by its old values, and tables that an evaluation
    in inference mode had made ended the next training step. Those before it stay, for passes in flight."""
    tables, freqs = RotaryTables(), frequencies()
    for mode, kept in ((True, 1), (False, 2), (False, 2)):
        with torch.inference_mode(mode):
            cos, sin = tables.tables(freqs, torch.float32, 1.0)
        assert torch.equal(cos, freqs.flatten(1).cos()) and torch.equal(sin, freqs.flatten(1).sin())
        assert not cos.is_inference()
        (pairs,) = (pairs for known in tables._tables.values() for pairs in known.values())
        assert len(pairs) == kept
        freqs.mul_(0.5)


def test_tables_die_with_the_frequencies_and_keep_nothing_alive() -> None:
    """Neither the frequencies nor the object, whichever of both dies first."""
    tables, freqs, others = RotaryTables(), frequencies(), frequencies()
    kept = tables.tables(others, torch.float32, 1.0)[0]
    dtypes = torch.float32, torch.bfloat16
    dying = [weakref.ref(table) for dtype in dtypes for table in tables.tables(freqs, dtype, 1.0)]
    del freqs
    assert all(table() is None for table in dying), "by reference counts alone"
    of_kept, of_others, of_tables = weakref.ref(kept), weakref.ref(others), weakref.ref(tables)
    del kept
    assert of_kept() is not None
    del tables
    gc.collect()
    assert of_tables() is None and of_others() is not None
    del others
    assert of_others() is None


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
    assert tables.tables(first, torch.bfloat16, 1.0)[0] is tables.tables(second, torch.bfloat16, 1.0)[0]
    assert torch.equal(first.cpu(), frequencies())
