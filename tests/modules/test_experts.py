# SPDX-License-Identifier: Apache-2.0
"""Rows sorted by expert, and grouped products, beside every expert on every row."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megagraph.modules import GroupedLinear, SortedRows

ROWS, EXPERTS, HIDDEN, INNER = 13, 5, 8, 16
UNROUTED = (3, 11, 12)


def choices(topk: int) -> Tensor:
    """Of random experts, never of the last one; some rows have none."""
    generator = torch.Generator().manual_seed(topk)
    chosen = torch.zeros(ROWS, EXPERTS, dtype=torch.bool)
    for row in set(range(ROWS)) - set(UNROUTED):
        chosen[row, torch.randperm(EXPERTS - 1, generator=generator)[:topk]] = True
    return chosen


def linear(in_features: int, out_features: int) -> GroupedLinear:
    made = GroupedLinear(EXPERTS, in_features, out_features, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_rows_are_sorted_by_expert(topk: int) -> None:
    chosen = choices(topk)
    found, end = SortedRows.of(chosen, topk), 0
    assert found.offsets.dtype is torch.int32
    for expert, next_end in enumerate(found.offsets.tolist()):
        assert found.rows[end:next_end].tolist() == chosen[:, expert].nonzero().flatten().tolist()
        assert (found.picks[end:next_end] % EXPERTS == expert).all()
        end = next_end
    assert sorted(found.rows[end:].tolist()) == [row for row in UNROUTED for _ in range(topk)]
    assert torch.equal(found.rows[found.places], torch.arange(ROWS)[:, None].expand(-1, topk))


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_grouped_products_are_those_of_every_expert(topk: int) -> None:
    torch.manual_seed(0)
    chosen, first, second = choices(topk), linear(HIDDEN, INNER), linear(INNER, HIDDEN)
    x, probs = torch.randn(ROWS, HIDDEN, requires_grad=True), torch.rand(ROWS, EXPERTS, requires_grad=True)
    rows = SortedRows.of(chosen, topk)
    inner = F.gelu(first(rows.permute(x), rows.offsets)) * rows.permute_probs(probs)[:, None]
    out = rows.combine(second(inner, rows.offsets))

    expected = torch.zeros_like(out)
    for expert in range(EXPERTS):
        weighted = F.gelu(x @ first.weight[expert].T) * probs[:, expert : expert + 1]
        expected = expected + weighted @ second.weight[expert].T * chosen[:, expert : expert + 1]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not out[list(UNROUTED)].any()
    inputs, grad = (x, probs, first.weight, second.weight), torch.randn_like(out)
    found, of_all = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    for one, other in zip(found, of_all, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not found[0][list(UNROUTED)].any() and not found[1][~chosen].any()
    assert not found[2][-1].any() and not found[3][-1].any()


def test_products_under_autocast_are_those_of_linear_layers() -> None:
    """Bug: torch's grouped product has no rule of autocast's, and refused rows that came from one with."""
    made, x = linear(HIDDEN, INNER), torch.randn(EXPERTS, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x.bfloat16(), torch.arange(1, EXPERTS + 1, dtype=torch.int32))
        expected = [F.linear(x[i], made.weight[i]) for i in range(EXPERTS)]
    torch.testing.assert_close(out, torch.stack(expected))
    out.backward(torch.ones_like(out))
    assert made.weight.grad is not None and made.weight.grad.dtype is torch.float32


def test_what_lies_past_the_rows_of_experts_reaches_nothing() -> None:
    rows = SortedRows.of(choices(2), 2)
    y = torch.full((2 * ROWS, HIDDEN), torch.nan)
    y[: int(rows.offsets[-1])] = 1
    out = rows.combine(y)
    assert (out[list(UNROUTED)] == 0).all() and out.isfinite().all()
    x = torch.zeros(ROWS, HIDDEN, requires_grad=True)
    probs = torch.zeros(ROWS, EXPERTS, requires_grad=True)
    for given, permuted in ((x, rows.permute(x)), (probs, rows.permute_probs(probs))):
        grad = torch.full_like(permuted, torch.nan)
        grad[: int(rows.offsets[-1])] = 1
        (found,) = torch.autograd.grad(permuted, given, grad)
        assert found.isfinite().all() and not found[list(UNROUTED)].any()


@pytest.mark.gpu
def test_other_dtypes_are_refused_where_torch_would_wait() -> None:
    made = linear(HIDDEN, INNER).cuda()
    with pytest.raises(ValueError, match="bfloat16"):
        made(torch.zeros(4, HIDDEN, device="cuda"), torch.zeros(EXPERTS, dtype=torch.int32, device="cuda"))
