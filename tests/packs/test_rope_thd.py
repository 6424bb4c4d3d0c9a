# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from rope_cases import LAYOUTS, frequencies, layouts, tables
from same_bits import assert_same_bits
from torch import Tensor

from megagraph.packs.ops import rope_thd


def reference(t: Tensor, cos: Tensor, sin: Tensor, lengths: list[int], layout: str) -> Tensor:
    """Each pair as a complex number, times cos + i sin of its position."""
    half = cos.size(1) // 2
    rotary, rest = t[..., : 2 * half], t[..., 2 * half :]
    halves = (rotary[..., :half], rotary[..., half:])
    neighbours = (rotary[..., ::2], rotary[..., 1::2])
    positions = torch.cat([torch.arange(length) for length in lengths]).to(t.device)
    one_a_pair = slice(None, None, 2) if layout == "interleaved" else slice(half)
    turn = torch.complex(cos, sin)[positions][:, None, one_a_pair]
    turned = torch.complex(*(halves if layout == "neox" else neighbours)) * turn
    if layout == "interleaved":
        return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)
    return torch.cat([turned.real, turned.imag, rest], -1)


@layouts
@settings(max_examples=25)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 3, 40]), min_size=1, max_size=6),
    tail=st.sampled_from([0, 1, 70]),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 0)]),
)
def test_queries_and_keys_turn_in_one_call_and_poison_stays_out(
    device: str, layout: str, lengths: list[int], tail: int, heads: tuple[int, int]
) -> None:
    end = sum(lengths)
    cos, sin = tables(frequencies(40, 8, layout, device), torch.float64)
    tensors = [
        torch.randn(end + tail, count, dim, device=device, dtype=torch.float64)
        for count, dim in zip(heads, (8, 12), strict=True)
    ]
    clean = [t[:end].clone() for t in tensors]
    grads = [torch.randn_like(t) for t in tensors]
    for t, grad in zip(tensors, grads, strict=True):
        t[end:] = torch.nan
        grad[end:] = torch.nan
        t.requires_grad_()
    out = rope_thd(tensors, cos, sin, offsets(lengths, device), layout=layout)
    found = torch.autograd.grad(out, tensors, grads)
    for result, gradient, t, grad in zip(out, found, clean, grads, strict=True):
        t.requires_grad_()
        expected = reference(t, cos, sin, lengths, layout)
        torch.testing.assert_close(result[:end], expected)
        torch.testing.assert_close(gradient[:end], torch.autograd.grad(expected, t, grad[:end])[0])
        for whole in (result, gradient):
            assert torch.equal(whole[end:], torch.zeros_like(whole[end:]))


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


def test_a_second_derivative_is_an_error(device: str) -> None:
    cos, sin = tables(frequencies(8, 4, "neox", device), torch.float32)
    t = torch.randn(6, 2, 4, device=device, requires_grad=True)
    (out,) = rope_thd([t], cos, sin, offsets([5], device))
    (grad,) = torch.autograd.grad(out.square().sum(), t, create_graph=True)
    with pytest.raises(RuntimeError, match="megagraph::rope_thd_backward is not implemented"):
        grad.sum().backward()


def refused_calls() -> dict[str, tuple[dict[str, object], str]]:
    t, table = torch.zeros(6, 2, 8), torch.zeros(8, 4)
    return {
        "no tensors": ({"tensors": []}, "between 1 and 4 tensors a call, got 0"),
        "five tensors": ({"tensors": [t] * 5}, "between 1 and 4 tensors a call, got 5"),
        "two layouts": (
            {"interleaved": True, "mla_interleaved": True},
            "interleaved and mla_interleaved exclude each other",
        ),
        "one-dimensional table": (
            {"cos": torch.zeros(8)},
            r"must both be \[positions, rotary_dim\], got \[8\] and \[8, 4\]",
        ),
        "odd rotary_dim": (
            {"cos": torch.zeros(8, 3), "sin": torch.zeros(8, 3)},
            "rotary_dim must be even, got 3",
        ),
        "strided table": ({"cos": torch.zeros(4, 8).t()}, "cos and sin must be contiguous"),
        "two-dimensional tensor": (
            {"tensors": [t[0]]},
            r"expected \[tokens, heads, head_dim\], got shape \[2, 8\]",
        ),
        "unlike tokens": ({"tensors": [t, t[1:]]}, "all tensors need the same number of tokens, got 5 and 6"),
        "wide table": (
            {"cos": torch.zeros(8, 10), "sin": torch.zeros(8, 10)},
            "rotary_dim 10 is larger than head_dim 8",
        ),
        "other dtype": (
            {"tensors": [t.bfloat16()]},
            "must have the tensors' dtype BFloat16, got Float and Float",
        ),
        "rank": ({"cp_rank": 1}, "need 0 <= cp_rank < cp_size, got cp_rank 1 and cp_size 1"),
        "offsets": ({"cu_seqlens_padded": torch.zeros(2)}, "cu_seqlens must be int32, got Float"),
    } | {"table": ({"sin": table.to("meta")}, "all tensors must be on one device")}


@pytest.mark.parametrize("case", refused_calls())
def test_arguments_that_do_not_fit_are_refused(device: str, case: str) -> None:
    change, message = refused_calls()[case]
    arguments = {
        "tensors": [torch.zeros(6, 2, 8)],
        "cos": torch.zeros(8, 4),
        "sin": torch.zeros(8, 4),
        "cu_seqlens_padded": offsets([4], "cpu"),
    } | change

    def move(value: object) -> object:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value

    with pytest.raises(ValueError, match=message):
        torch.ops.megagraph.rope_thd(**{name: move(value) for name, value in arguments.items()})


def test_an_unknown_layout_is_refused() -> None:
    t, table = torch.zeros(6, 2, 8), torch.zeros(8, 4)
    with pytest.raises(ValueError, match=r"layout: expected one of neox, interleaved, .*got 'gptj'"):
        rope_thd([t], table, table, offsets([4], "cpu"), layout="gptj")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cu_seqlens", "cp_size", "error", "message"),
    [
        ([0, 9], 1, IndexError, "row 8 has position 8, past the 8 positions of the tables"),
        ([0, 13], 1, ValueError, "the last offset 13 is past the 12 physical tokens"),
        ([0, 4, 2], 1, ValueError, "document 1 has length -2; offsets must not decrease"),
        ([1, 4], 1, ValueError, "the first offset must be 0, got 1"),
        ([0, 6], 2, ValueError, r"document 0 has length 6, not a multiple of 2 \* cp_size = 4"),
    ],
)
def test_offsets_that_do_not_fit_are_refused_on_the_cpu(
    cu_seqlens: list[int], cp_size: int, error: type[Exception], message: str
) -> None:
    cos, sin = tables(frequencies(8, 4, "neox", "cpu"), torch.float32)
    with pytest.raises(error, match=message):
        rope_thd(
            [torch.zeros(12, 1, 4)], cos, sin, torch.tensor(cu_seqlens, dtype=torch.int32), cp_size=cp_size
        )


@layouts
def test_opcheck(device: str, layout: str) -> None:
    cos, sin = tables(frequencies(16, 4, layout, device), torch.float32)
    q, k = (torch.randn(9, heads, 6, device=device, requires_grad=True) for heads in (2, 1))
    arguments = ([q, k], cos, sin, offsets([4, 0, 3], device))
    torch.library.opcheck(torch.ops.megagraph.rope_thd.default, arguments, LAYOUTS[layout])
    arguments = ([q.detach(), k.detach()], *arguments[1:])
    torch.library.opcheck(torch.ops.megagraph.rope_thd_backward.default, arguments, LAYOUTS[layout])


def test_compiles_without_a_graph_break(device: str) -> None:
    cos, sin = tables(frequencies(16, 4, "neox", device), torch.float32)

    def step(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> Tensor:
        turned_q, turned_k = rope_thd([q * 2, k], cos, sin, cu_seqlens)
        return (turned_q * turned_k).square()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows, lengths in ((9, [4, 0, 3]), (12, [10])):
        q, k = (torch.randn(rows, heads, 6, device=device, requires_grad=True) for heads in (2, 1))
        results = []
        for run in (step, compiled):
            out = run(q, k, offsets(lengths, device))
            results.append((out, *torch.autograd.grad(out.sum(), (q, k))))
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(actual, expected)
