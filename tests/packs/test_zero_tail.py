# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offsets import offsets
from torch.autograd import forward_ad

from megagraph import _C as _C  # registers the ops

zero_tail = torch.ops.megagraph.zero_tail


@settings(max_examples=80)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 3, 300]), max_size=5),
    rows_past_the_pack=st.sampled_from([0, 1, 50]),
    tokens=st.sampled_from([0, 1, 7, 300, 1000]),
    width=st.sampled_from([0, 1, 3, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_poison_in_the_tail_reaches_neither_the_result_nor_the_gradient(
    device: str, lengths: list[int], rows_past_the_pack: int, tokens: int, width: int, dtype: torch.dtype
) -> None:
    end = sum(lengths)
    x = torch.randn(end + rows_past_the_pack, width, device=device).to(dtype)
    x[end:] = torch.nan
    x.requires_grad_()
    kept = min(end, tokens)

    out = zero_tail(x, offsets(lengths, device), tokens)
    assert out.shape == (tokens, width)
    assert torch.equal(out[:kept], x[:kept])
    assert torch.equal(out[kept:], torch.zeros_like(out[kept:]))

    grad = torch.randn(tokens, width, device=device).to(dtype)
    grad[kept:] = torch.nan
    (x_grad,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(x_grad[:kept], grad[:kept])
    assert torch.equal(x_grad[kept:], torch.zeros_like(x_grad[kept:]))


def test_strided_views_and_integers_are_copied_in_order(device: str) -> None:
    x = torch.arange(48, device=device).view(8, 6).t()[1:]  # [5, 8], neither contiguous nor aligned
    out = zero_tail(x, offsets([2, 1], device), 4)
    assert out.is_contiguous()
    assert out.tolist() == [*x[:3].tolist(), [0] * 8]


def test_gradcheck(device: str) -> None:
    x = torch.randn(6, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    for tokens in (3, 6, 9):
        assert torch.autograd.gradcheck(lambda x, n=tokens: zero_tail(x, offsets([1, 0, 3], device), n), x)


def test_second_derivative_is_zero_tail_again(device: str) -> None:
    x = torch.randn(6, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: zero_tail(x, offsets([4], device), 5), x)


def test_in_place_op_zeroes_several_tails_and_bumps_the_version(device: str) -> None:
    xs = [torch.full(shape, torch.nan, device=device) for shape in ((7, 4), (5, 3), (2, 2), (0, 2))]
    for x in xs:
        x[:3] = 1
    torch.ops.megagraph.zero_tail_(xs, offsets([1, 2], device))
    for x in xs:
        assert torch.equal(x[:3], torch.ones_like(x[:3]))
        assert torch.equal(x[3:], torch.zeros_like(x[3:]))

    x, factor = torch.ones(4, device=device), torch.ones(4, device=device, requires_grad=True)
    product = (x * factor).sum()
    torch.ops.megagraph.zero_tail_([x], offsets([1], device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_forward_mode_is_refused(device: str) -> None:
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(torch.randn(3, 2, device=device), torch.ones(3, 2, device=device))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            zero_tail(dual, offsets([3], device), 4)
