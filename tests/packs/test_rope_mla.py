# SPDX-License-Identifier: Apache-2.0
"""rope_mla: bits of its roundings, gradients, tails, context parallelism, refusals."""

import itertools
from typing import Any

import pytest
import torch
from offsets import offsets
from rope_cases import frequencies, tables
from same_bits import assert_same_bits
from torch import Tensor

from megagraph.packs.ops import rope_mla, rope_thd

MSCALE = 1.2079
# heads, content, rotary and value dimensions
SHAPES = [(3, 4, 8, 6), (1, 16, 16, 16), (5, 8, 2, 0), (2, 0, 16, 8), (16, 128, 64, 128), (7, 64, 32, 64)]
SHAPES += [(3, 5, 130, 7), (2, 8, 256, 8)]  # of which a warp holds parts of a head
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = (128, 128, 64, 128)  # of models that are trained
Shape = tuple[int, int, int, int]


def inputs(shape: Shape, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, kv and k_pe as attention has them: views of projections' outputs."""
    heads, content, rotary, value = shape
    q, kv = (
        torch.randn(rows, heads * dim, device=device).to(dtype).view(rows, heads, dim)
        for dim in (content + rotary, content + value)
    )
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


def summed(grads: Tensor) -> Tensor:
    """Over heads, in their order, in float32. [T, H, R] to [T, 1, R]."""
    total = torch.zeros_like(grads[:, :1], dtype=torch.float32)
    for head in range(grads.size(1)):
        total += grads[:, head : head + 1].float()
    return total.to(grads.dtype)


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
        (at,) = rope_thd(
            [ones], positions, torch.zeros_like(positions), offsets(lengths, device), layout="neox", **rank
        )
        c, s = (table[at[:, 0, 0].long()][:, None] for table in (cos, sin))
        # Few bits, so that float64 holds every sum of float32.
        all_rows = [t.bfloat16().to(dtype) for t in inputs(shape, rows + 2, dtype, device)]
        grads = [t.bfloat16().to(dtype) for t in random_grads(shape, rows + 2, dtype, device)]
        for t in (*all_rows, *grads):
            t[rows:] = torch.nan
        q, kv, k_pe = (t[:rows] for t in all_rows)
        dq, dk, dv = (t[:rows] for t in grads)
        key = fused_reference(k_pe, c, s, backward=False).expand(-1, heads, -1)
        expected = [
            torch.cat((q[..., :content], fused_reference(q[..., content:], c, s, backward=False)), -1),
            torch.cat((kv[..., :content], key), -1),
            kv[..., content:],
            torch.cat((dq[..., :content], fused_reference(dq[..., content:], c, s, backward=True)), -1),
            torch.cat((dk[..., :content], dv), -1),
            fused_reference(summed(dk[..., content:]), c, s, backward=True),
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
    below = one * other - torch.finfo(dtype).eps / 2
    above = below + torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).tiny
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

    def turn(q: Tensor, kv: Tensor, k_pe: Tensor) -> tuple[Tensor, ...]:
        return rope_mla(q * 1, kv, k_pe, (cos, sin, offsets([4, 0, 3], device)), v_dim=6)

    assert torch.autograd.gradcheck(turn, leaves)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_launch_has_the_bits_of_two(device: str, shape: Shape) -> None:
    freqs = frequencies(16, shape[2], "mla_interleaved", device)
    how = (*tables(freqs, torch.bfloat16), offsets([5, 11], device))
    q, kv, k_pe = inputs(shape, 19, torch.bfloat16, device)
    dq, dk, dv = random_grads(shape, 19, torch.bfloat16, device)
    together = run(q, kv, k_pe, (dq, dk, dv), *how, v_dim=shape[3])
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
    first = torch.autograd.grad(query, leaf, grad, retain_graph=True)
    second = torch.autograd.grad(query, leaf, grad)
    assert torch.equal(grad, given_grad) and torch.equal(first[0], second[0])


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (3, 2)])
def test_no_rows_no_heads_no_documents(device: str, shape: tuple[int, int]) -> None:
    rows, heads = shape
    cos, sin = tables(frequencies(8, 8, "mla_interleaved", device), torch.float32)
    all_rows = inputs((heads, 4, 8, 4), rows, torch.float32, device)
    grads = [torch.randn(rows, heads, dim, device=device) for dim in (12, 12, 4)]
    assert not any(out.any() for out in run(*all_rows, grads, cos, sin, offsets([], device), v_dim=4))


def test_gradients_that_are_no_rows_of_memory(device: str) -> None:
    """Expanded, transposed, and of outputs that nothing was made of."""
    how = small(device)
    _q, kv, k_pe = (t.requires_grad_() for t in inputs((2, 4, 8, 4), 6, torch.float32, device))
    key, _value = rope_mla(None, kv, k_pe, how, v_dim=4)
    expanded = torch.autograd.grad(key.sum(), (kv, k_pe), retain_graph=True)
    plain = torch.autograd.grad(key, (kv, k_pe), torch.ones_like(key), retain_graph=True)
    assert_same_bits(expanded, plain)
    grad = torch.randn(12, 2, 6, device=device).permute(2, 1, 0)
    one = torch.autograd.grad(key, (kv, k_pe), grad, retain_graph=True)
    other = torch.autograd.grad(key, (kv, k_pe), grad.contiguous())
    assert_same_bits(one, other)


@pytest.mark.parametrize("name", ["q", "kv", "k_pe"])
def test_the_op_itself_refuses_what_requires_grad(device: str, name: str) -> None:
    how = small(device)
    given = dict(zip(("q", "kv", "k_pe"), inputs((2, 4, 8, 4), 6, torch.float32, device), strict=True))
    given[name].requires_grad_()
    given |= dict.fromkeys(("kv", "k_pe") if name == "q" else ("q",))
    before = given[name].detach().clone()
    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.ops.megagraph.rope_mla_(*given.values(), *how, v_dim=4)
    assert torch.equal(given[name], before)
    with torch.no_grad():
        torch.ops.megagraph.rope_mla_(*given.values(), *how, v_dim=4)


@pytest.mark.gpu
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("shape", "dtype", "cp_size"),
    [
        *itertools.product([(16, 128, 64, 128), (1, 64, 32, 64)], DTYPES, [1, 4]),
        *((LARGEST, torch.bfloat16, cp_size) for cp_size in (1, 4)),  # theirs take half a minute to compile
    ],
    ids=str,
)
def test_bits_of_fused_kernels(fused_kernels: Any, shape: Shape, dtype: torch.dtype, cp_size: int) -> None:
    """Theirs must not get a tail, nor heads that are no power of two: blocks of them run over."""
    _heads, content, rotary, value = shape
    for seed, lengths in enumerate(([40, 8, 120, 64], [1024], [8] * 17, [16, 0, 240, 0])):
        torch.manual_seed(seed)
        rows = sum(lengths) // cp_size
        freqs = frequencies(1100, rotary, "mla_interleaved", "cuda")
        cos, sin = tables(freqs, dtype, MSCALE)
        cu_seqlens = offsets(lengths, "cuda")
        for cp_rank in range(cp_size):
            all_rows = inputs(shape, rows, dtype, "cuda")
            grads = random_grads(shape, rows, dtype, "cuda")
            q, kv, k_pe = (t.detach().clone().requires_grad_() for t in all_rows)
            wide = [table[:, None, None] for table in (cos, sin)]
            rank = (cu_seqlens, cp_rank, cp_size)
            query = fused_kernels.fused_apply_mla_rope_for_q(q * 1, *wide, content, rotary, *rank)
            made = fused_kernels.fused_apply_mla_rope_for_kv(kv, k_pe, *wide, rotary, content, value, *rank)
            out = (query, *made)
            theirs_grads = torch.autograd.grad(out, (q, kv, k_pe), [grad.clone() for grad in grads])
            options = {"v_dim": value, "cp_size": cp_size, "cp_rank": cp_rank}
            ours = run(*all_rows, grads, cos, sin, cu_seqlens, **options)
            assert_same_bits(ours, [*out, *theirs_grads], f"{lengths}, rank {cp_rank}")
