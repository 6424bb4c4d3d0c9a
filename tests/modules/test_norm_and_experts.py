# SPDX-License-Identifier: Apache-2.0
"""The norm for Megatron's specs, with torch's bits; grouped products, beside each expert on all rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.modules import GroupedLinear, Norm, SortedRows

HIDDEN = 48
EPS = 1e-3
TORCH = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

each_kind = pytest.mark.parametrize("normalization", TORCH)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def config(normalization: str = "LayerNorm", **changes: Any) -> Any:
    """The fields of Megatron's config that a norm reads."""
    flags = ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm", "persist_layer_norm")
    fields = dict.fromkeys((*flags, "sequence_parallel"), False)
    return SimpleNamespace(normalization=normalization, **{**fields, **changes})


def pair(normalization: str, dtype: torch.dtype) -> tuple[Norm, nn.Module]:
    """Ours and torch's, with the same random parameters."""
    ours = Norm(config(normalization), HIDDEN, eps=EPS)
    theirs = TORCH[normalization](HIDDEN, eps=EPS)
    torch.manual_seed(3)
    for param in theirs.parameters():
        nn.init.normal_(param)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(DEVICE, dtype), theirs.to(DEVICE, dtype)


def results(norm: nn.Module, hidden_states: Tensor) -> list[Tensor]:
    """The output, the input's gradient and those of the parameters."""
    given = hidden_states.clone().requires_grad_()
    out = norm(given)
    out.backward(torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out.dtype))
    found = [given.grad, *(param.grad for param in norm.parameters())]
    assert all(grad is not None for grad in found)
    return [out.detach(), *found]


@each_kind
@each_dtype
@pytest.mark.parametrize("shape", [(7, 1, HIDDEN), (5, 4, 3, HIDDEN), (0, 1, HIDDEN)], ids=str)
def test_it_has_torchs_bits(normalization: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ours, theirs = pair(normalization, dtype)
    hidden_states = 3 * torch.randn(shape, device=DEVICE, dtype=dtype) + 1
    assert_same_bits(results(ours, hidden_states), results(theirs, hidden_states))


@each_kind
def test_fresh_and_reset_parameters_are_torchs(normalization: str) -> None:
    ours, theirs = Norm(config(normalization), HIDDEN), TORCH[normalization](HIDDEN)
    for _ in range(2):
        assert_same_bits(dict(ours.state_dict()), dict(theirs.state_dict()))
        for param in ours.parameters():
            nn.init.normal_(param)
        ours.reset_parameters()


@each_kind
def test_a_zero_centred_scale_is_one_more_than_its_parameter(normalization: str) -> None:
    centered = Norm(config(normalization, layernorm_zero_centered_gamma=True), HIDDEN, eps=EPS)
    for _ in range(2):
        assert not any(param.any() for param in centered.parameters())
        nn.init.normal_(centered.weight)
        centered.reset_parameters()
    plain = Norm(config(normalization), HIDDEN, eps=EPS)
    offsets = torch.arange(HIDDEN) / 64  # exact, also with one added
    centered.weight.data.copy_(offsets)
    plain.weight.data.copy_(offsets + 1)
    hidden_states = torch.randn(7, 1, HIDDEN, device=DEVICE)
    assert_same_bits(*(results(norm.to(DEVICE), hidden_states) for norm in (centered, plain)))


@each_kind
@pytest.mark.parametrize("is_parallel", [False, True])
def test_parameters_are_marked_for_sequence_parallelism(normalization: str, is_parallel: bool) -> None:
    norm = Norm(config(normalization, sequence_parallel=is_parallel), HIDDEN)
    assert all(param.sequence_parallel is is_parallel for param in norm.parameters())
    # As Megatron moves models and turns them into half precision.
    norm = norm.to(DEVICE).bfloat16()
    assert all(param.sequence_parallel is is_parallel for param in norm.parameters())


def test_what_it_does_not_do_is_refused_by_name_and_a_kernel_of_apex_is_not_asked_for() -> None:
    """Megatron-LM sets `persist_layer_norm` unless it is told not to."""
    assert isinstance(Norm(config(persist_layer_norm=True), HIDDEN), Norm)
    with pytest.raises(ValueError, match="expected normalization 'LayerNorm' or 'RMSNorm', got 'L2Norm'"):
        Norm(config("L2Norm"), HIDDEN)
    with pytest.raises(ValueError, match="expected memory_efficient_layer_norm False, got True"):
        Norm(config(memory_efficient_layer_norm=True), HIDDEN)


def test_it_prints_what_it_is() -> None:
    assert repr(Norm(config("RMSNorm"), 8, eps=1e-6)) == "Norm(RMSNorm, 8, eps=1e-06)"
    norm = Norm(config(layernorm_zero_centered_gamma=True), 8)
    assert repr(norm) == "Norm(LayerNorm, 8, eps=1e-05, zero-centered)"


# -- rows sorted by expert, and grouped products -----------------------------------------------------


ROWS, EXPERTS, FEATURES, INNER = 13, 5, 8, 16
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
def test_grouped_products_are_those_of_every_expert(topk: int) -> None:
    torch.manual_seed(0)
    chosen, first, second = choices(topk), linear(FEATURES, INNER), linear(INNER, FEATURES)
    x, probs = torch.randn(ROWS, FEATURES, requires_grad=True), torch.rand(ROWS, EXPERTS, requires_grad=True)
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
    made, x = linear(FEATURES, INNER), torch.randn(EXPERTS, FEATURES)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x.bfloat16(), torch.arange(1, EXPERTS + 1, dtype=torch.int32))
        expected = [F.linear(x[i], made.weight[i]) for i in range(EXPERTS)]
    torch.testing.assert_close(out, torch.stack(expected))
    out.backward(torch.ones_like(out))
    assert made.weight.grad is not None and made.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_product_makes_its_input_again_unless_autocast_would_make_another(
    dtype: torch.dtype | None,
) -> None:
    made, offsets = linear(FEATURES, INNER), torch.arange(1, EXPERTS + 1, dtype=torch.int32)
    x, calls = torch.randn(EXPERTS, FEATURES, requires_grad=True), list[Tensor]()

    def doubled(x: Tensor) -> Tensor:
        calls.append(x)
        return F.linear(x, 2 * torch.eye(FEATURES))

    def grads(run: Callable[[], Tensor]) -> Any:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            out = run()
        return torch.autograd.grad(out, (x, made.weight), torch.ones_like(out))

    again = grads(lambda: made.of_made(offsets, doubled, x))
    assert len(calls) == (2 if dtype is None else 1)
    assert_same_bits(again, grads(lambda: made(doubled(x), offsets)))


def test_what_lies_past_the_rows_of_experts_reaches_nothing() -> None:
    rows = SortedRows.of(choices(2), 2)
    y = torch.full((2 * ROWS, FEATURES), torch.nan)
    y[: int(rows.offsets[-1])] = 1
    out = rows.combine(y)
    assert (out[list(UNROUTED)] == 0).all() and out.isfinite().all()
    x = torch.zeros(ROWS, FEATURES, requires_grad=True)
    probs = torch.zeros(ROWS, EXPERTS, requires_grad=True)
    for given, permuted in ((x, rows.permute(x)), (probs, rows.permute_probs(probs))):
        grad = torch.full_like(permuted, torch.nan)
        grad[: int(rows.offsets[-1])] = 1
        (found,) = torch.autograd.grad(permuted, given, grad)
        assert found.isfinite().all() and not found[list(UNROUTED)].any()


@pytest.mark.gpu
def test_other_dtypes_are_refused_where_torch_would_wait() -> None:
    made = linear(FEATURES, INNER).cuda()
    with pytest.raises(ValueError, match="bfloat16"):
        made(torch.zeros(4, FEATURES, device="cuda"), torch.zeros(EXPERTS, dtype=torch.int32, device="cuda"))
