# SPDX-License-Identifier: Apache-2.0
"""The norm for Megatron's specs: torch's bits, marks for sequence parallelism, zero-centred scales."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.modules import Norm

HIDDEN = 48
EPS = 1e-3
TORCH = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

each_kind = pytest.mark.parametrize("normalization", TORCH)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def config(normalization: str = "LayerNorm", **changes: Any) -> Any:
    """The fields of Megatron's config that a norm reads."""
    fields: dict[str, Any] = {
        "normalization": normalization,
        "layernorm_zero_centered_gamma": False,
        "memory_efficient_layer_norm": False,
        "persist_layer_norm": False,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**{**fields, **changes})


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
def test_it_has_the_bits_of_torchs_norm(
    normalization: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
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
