# SPDX-License-Identifier: Apache-2.0
"""Bugs that were found once; each docstring tells what went wrong."""

import weakref
from collections.abc import Sequence

import pytest
import torch
from bank_pair import ROWS, WIDTH, Applies, Block, Pair, RunningBank, blocks, new_bank, run_eager, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.decide.reasons import EagerReason


def test_outputs_and_kept_gradients_outlive_the_bank() -> None:
    """On the host backend they pointed into memory that release() had freed."""
    pair = Pair("cpu", blocks(), num_slots=2).capture()
    micro_batch = pair.forward()
    kept: list[Tensor] = []
    scaled = pair.input().requires_grad_() * 2
    scaled.register_hook(kept.append)
    with pair.bank.micro_batch("train"):
        out = pair.bank(scaled)
    out.sum().backward()
    before = kept[0].clone()
    pointers = {kept[0].data_ptr(), micro_batch.output.data_ptr()}
    pair.bank.release()
    others = [torch.full((ROWS, WIDTH), 7.0) for _ in range(500)]
    assert not pointers & {other.data_ptr() for other in others}
    micro_batch.check_outputs()
    assert torch.equal(kept[0], before)


def test_an_eager_op_between_two_sites_changes_no_bit(device: str) -> None:
    """Its result was staged into the next site's input, which is the buffer that it was computed from."""
    pair = Pair(device, blocks(2)).capture()

    def ours(x: Tensor) -> Tensor:
        first = pair.bank.sites[0](x)
        between = first * first  # saves what it was given
        out = pair.bank.sites[1](between)
        return pair.layers[1](between) if out is NotImplemented else out

    def eager(x: Tensor) -> Tensor:
        first = pair.eager_layers[0](x)
        return pair.eager_layers[1](first * first)

    for _ in range(3):
        pair.step(ours=ours, eager=eager)


@pytest.mark.parametrize("detach", [False, True])
def test_a_second_pass_in_a_micro_batch_leaves_the_output_of_the_first_alone(
    device: str, detach: bool
) -> None:
    """Once the site was not live any more, its held output was overwritten."""
    pair = Pair(device, blocks(1)).capture()
    site = pair.bank.sites[0]
    with pair.bank.micro_batch("train"):
        out = site(pair.input())
        if detach:
            out = out.detach()
        else:
            out.sum().backward()
        before, held = out.detach().clone(), pair.bank.holders()
        assert site(pair.input()) is NotImplemented
        assert torch.equal(out, before) and pair.bank.holders() == held
        assert pair.eager_calls() == {"NESTING": 1}


def test_a_gradient_of_a_gradient_is_refused(pair: Pair) -> None:
    """It came back without a history: a penalty on it silently trained nothing."""
    micro_batch = pair.forward()
    with pytest.raises(RuntimeError, match=r"create_graph=True"):
        torch.autograd.grad(micro_batch.output.sum(), micro_batch.input, create_graph=True)


def test_release_within_a_micro_batch_runs_the_rest_eager(device: str) -> None:
    """The next site raised `vector::_M_range_check`."""
    pair = Pair(device, blocks(2)).capture()
    with pair.bank.micro_batch("train"):
        first = pair.bank.sites[0](pair.input())
        pair.bank.release()
        assert pair.bank.sites[1](first) is NotImplemented
    assert pair.eager_calls() == {"RELEASED": 1}


def test_a_failure_keeps_nothing_of_its_attempt(device: str) -> None:
    """The traceback's frames held tensors of the failed capture for the bank's life."""
    left: list[weakref.ref[Tensor]] = []

    def fails(hidden: Tensor) -> Tensor:
        mine = hidden + 1
        left.append(weakref.ref(mine))
        raise ValueError("from the layer")

    pair = Pair(device, [Block(), Applies(fails)]).capture()
    assert len(pair.bank.failures) == 1
    assert [ref() for ref in left] == [None]


def test_a_bank_does_not_go_on_watching_every_op(device: str) -> None:
    """Each host-backend capture left its op trace on; a second one doubled the names it recorded."""
    pairs = [Pair(device, blocks(1)).capture() for _ in range(3)]
    trace = _C.OpTrace()
    torch.zeros(2).neg()
    assert trace.last_op == "aten::neg"
    del pairs


@pytest.mark.gpu
def test_a_layer_that_draws_on_the_host_stays_eager() -> None:
    """Its number was frozen in the graph: no graph advances the CPU's generator."""
    skips = Applies(lambda hidden: hidden * (1 + torch.rand(()).item()))
    pair = Pair("cuda", [Block(), skips]).capture()
    assert [failure.reason for failure in pair.bank.failures] == [EagerReason.RNG_NOT_GRAPH_SAFE]


WIDE, MANY = 640, 8192  # of matrix products that need a workspace


def captured_wide(layers: Sequence[nn.Module]) -> RunningBank:
    bank = new_bank([layer.to("cuda", torch.bfloat16) for layer in layers], "cuda")
    bank.capture([variant(rows=MANY, row_shape=(WIDE,), dtype=torch.bfloat16)])
    return bank


def strangers(*sizes: int) -> list[Tensor]:
    """Take whatever memory has become free; who writes there shows."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [torch.full((size,), torch.nan, device="cuda") for size in sizes]


def replayed(bank: RunningBank, layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The output and all gradients of a replay."""
    params = [param for layer in layers for param in layer.parameters()]
    for leaf in (x, *params):
        leaf.grad = None
    with bank.micro_batch("train") as reason:
        assert reason is None
        out = bank(x)
    got = out.detach().clone()
    out.square().sum().backward()
    return [got, *(leaf.grad for leaf in (x, *params))]


def run_wide(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    out = run_eager(layers, x)
    leaves = [x, *(param for layer in layers for param in layer.parameters())]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.gpu
def test_the_end_of_one_bank_leaves_the_workspaces_of_another() -> None:
    """torch frees a cuBLAS workspace with any graph of its stream: other graphs went on using it."""
    layers, others = [nn.Linear(WIDE, WIDE)], [nn.Linear(WIDE, WIDE)]
    bank, other = captured_wide(layers), captured_wide(others)
    other.release()
    held = strangers(*[2 << 20] * 64)
    x = torch.randn(MANY, WIDE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        assert_same_bits(replayed(bank, layers, x), run_wide(layers, x))
    assert all(bool(stranger.isnan().all()) for stranger in held)


@pytest.mark.gpu
def test_replays_outlive_the_workspaces_that_torch_clears() -> None:
    """No bug so far: `torch.compile` frees every cuBLAS workspace where it asks for graphs of its own.

    Graphs hold the addresses of theirs; a replay must neither read what is there now nor write to it.
    """
    layers = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)) for _ in range(3)]
    bank, held = captured_wide(layers), []
    x = torch.randn(MANY, WIDE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    want = run_wide(layers, x)
    for _ in range(4):
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        held += strangers(*[1 << 21, 1 << 18, 1 << 10] * 8)  # pieces of any size that a workspace has
        assert_same_bits(replayed(bank, layers, x), want)
    assert all(bool(stranger.isnan().all()) for stranger in held)
    assert bank.counters()["replays"] == 4 * len(layers)
