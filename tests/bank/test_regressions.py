# SPDX-License-Identifier: Apache-2.0
"""Bugs that were found once; each docstring tells what went wrong."""

import weakref
from typing import Any

import pytest
import torch
from bank_pair import ROWS, WIDTH, Block, Pair, blocks, give_main_grads, new_bank, variant
from same_bits import assert_same_bits
from test_eligibility import accumulator_of, found, keep
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.sites import MetadataSpec, VariantSpec
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


def test_autograd_grad_of_parameters_is_not_overwritten_by_the_next_backward(device: str) -> None:
    """The graph's own buffer was handed out."""
    pair = Pair(device, blocks()).capture()
    params = [param for layer in pair.layers for param in layer.parameters()]
    micro_batch = pair.forward()
    grads = torch.autograd.grad(micro_batch.output.sum(), params)
    del micro_batch
    before = [grad.clone() for grad in grads]
    pair.forward().backward()
    for grad, want in zip(grads, before, strict=True):
        assert_same_bits(grad, want, "gradient")


def test_an_eager_op_between_two_sites_changes_no_bit(device: str) -> None:
    """Its result was staged into the next site's input, which is the buffer that it was computed from."""
    pair = Pair(device, blocks(2)).capture()
    for _ in range(3):
        hidden = pair.input()
        x, eager_x = (hidden.clone().requires_grad_() for _ in range(2))
        with pair.bank.micro_batch("train"):
            first = pair.bank.sites[0](x)
            between = first * first  # saves what it was given
            out = pair.bank.sites[1](between)
            if out is NotImplemented:
                out = pair.layers[1](between)
        eager_first = pair.eager_layers[0](eager_x)
        eager = pair.eager_layers[1](eager_first * eager_first)
        assert_same_bits(out, eager, "output")
        out.sum().backward()
        eager.sum().backward()
        assert_same_bits(x.grad, eager_x.grad, "gradient of the input")
        pair.check_state()
        del first, between, out


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
        before = out.detach().clone()
        assert site(pair.input()) is NotImplemented
        assert torch.equal(out, before)
        assert pair.eager_calls() == {"NESTING": 1}


def test_a_forward_runs_only_while_no_gradient_of_its_slot_is_held() -> None:
    """A gradient lies where an earlier site's forward may have its temporaries."""
    slot = _C.Slot(0, 4)
    assert slot.lease(0, True)
    assert slot.enter(3)
    assert slot.leave(3)
    slot.retain_tensor(3, _C.LeaseKind.GRADIENT)
    slot.node_done(3)
    assert not slot.enter(2)
    slot.release_tensor(3, _C.LeaseKind.GRADIENT)
    assert slot.enter(2)


def test_a_gradient_of_a_gradient_is_refused(device: str) -> None:
    """It came back without a history: a penalty on it silently trained nothing."""
    pair = Pair(device, blocks()).capture()
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

    class Fails(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            mine = hidden + 1
            left.append(weakref.ref(mine))
            raise ValueError("from the layer")

    pair = Pair(device, [Block(), Fails()])
    pair.capture()
    assert len(pair.bank.failures) == 1
    assert [ref() for ref in left] == [None]


def test_a_bank_does_not_go_on_watching_every_op(device: str) -> None:
    """Each host-backend capture left its op trace on; a second one doubled the names it recorded."""
    pairs = [Pair(device, blocks(1)).capture() for _ in range(3)]
    trace = _C.OpTrace()
    torch.zeros(2).neg()
    assert trace.last_op == "aten::neg"
    del pairs


def test_a_hook_beside_the_callers_own_is_found() -> None:
    """Python's hooks on one accumulator share one dictionary, and were counted as one."""
    module = Block()
    accumulators = give_main_grads([module])
    assert found([module], accumulator_hooks=lambda param: 1) == {}
    handle = accumulator_of(module.norm.bias).register_hook(keep)
    assert found([module], accumulator_hooks=lambda param: 1)[0][0] is EagerReason.FOREIGN_HOOK
    handle.remove()
    assert found([module], accumulator_hooks=lambda param: 1) == {}
    del accumulators


class Rebinds(nn.Module):
    """Counts its calls in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.steps: Tensor = self.steps + 1
        return hidden * self.steps


def test_a_layer_that_assigns_a_buffer_anew_stays_eager(device: str) -> None:
    """Its buffer was frozen in the graph, and the capture's own tensor was left in the module."""
    pair = Pair(device, [nn.Linear(WIDTH, WIDTH), Rebinds()])
    before: Any = pair.layers[1].steps
    pair.capture()
    assert pair.layers[1].steps is before
    assert [failure.index for failure in pair.bank.failures] == [1]
    for _ in range(3):
        assert pair.step() is None


@pytest.mark.gpu
def test_a_layer_that_draws_on_the_host_stays_eager() -> None:
    """Its number was frozen in the graph: no graph advances the CPU's generator."""

    class Skips(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden * (1 + torch.rand(()).item())

    pair = Pair("cuda", [Block(), Skips()]).capture()
    assert [failure.reason for failure in pair.bank.failures] == [EagerReason.RNG_NOT_GRAPH_SAFE]


def test_a_mask_without_a_source_is_filled_from_the_end(device: str) -> None:
    """It kept its example's content."""
    buffers: list[Tensor] = []
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = new_bank([layer], device)
    mask = MetadataSpec(
        kind=_C.SegmentKind.MASK, example=torch.zeros(5, dtype=torch.bool, device=device), source=-1
    )
    bank.capture(
        [
            variant(
                rows=5,
                metadata={"mask": mask},
                end_source=0,
                fewer_rows=True,
                arguments=lambda given: buffers.append(given["mask"]) or {},
            )
        ]
    )
    with bank.micro_batch("train", [torch.tensor([0, 2, 3], dtype=torch.int32, device=device)]):
        bank(torch.randn(4, WIDTH, device=device))
    assert buffers[0].tolist() == [False, False, False, True, True]


def test_a_mask_without_an_end_is_an_error(device: str) -> None:
    """It read through a null pointer."""
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = new_bank([layer], device)
    mask = MetadataSpec(
        kind=_C.SegmentKind.MASK, example=torch.zeros(ROWS, dtype=torch.bool, device=device), source=0
    )
    with pytest.raises(ValueError, match=r"a mask needs the pack's end"):
        bank.capture([variant(metadata={"mask": mask})])


def test_missing_metadata_is_an_error_that_leases_nothing(device: str) -> None:
    """It raised `vector::_M_range_check`, for the pack's end after a slot had been leased."""
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = new_bank([layer], device)
    bank.capture([variant(fewer_rows=True, end_source=0)])
    with pytest.raises(ValueError, match=r"expected 1 metadata sources, got 0"):
        bank.begin("train", [])
    assert bank.core.all_free()


@pytest.mark.gpu
def test_the_end_of_one_bank_leaves_the_workspaces_of_another() -> None:
    """torch frees a cuBLAS workspace with any graph of its stream: other graphs went on using it."""
    width, rows = 640, 8192

    def captured() -> tuple[Bank, nn.Linear]:
        layer = nn.Linear(width, width).to("cuda", torch.bfloat16)
        bank = new_bank([layer], "cuda")
        spec = VariantSpec(key="train", training=True, rows=rows, row_shape=(width,), dtype=torch.bfloat16)
        bank.capture([spec])
        return bank, layer

    bank, layer = captured()
    other, _ = captured()
    other.release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    strangers = [torch.full((2 << 20,), float("nan"), device="cuda") for _ in range(64)]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        layer.weight.grad = None
        with bank.micro_batch("train") as reason:
            assert reason is None
            bank(x).sum().backward()
        weight_grad = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
        assert_same_bits(layer.weight.grad, weight_grad, "gradient")
    assert all(bool(stranger.isnan().all()) for stranger in strangers)
    bank.release()


@pytest.mark.gpu
def test_replays_outlive_the_workspaces_that_torch_clears() -> None:
    """No bug so far: `torch.compile` frees every cuBLAS workspace where it asks for graphs of its own.

    Graphs hold the addresses of theirs; a replay must neither read what is there now nor write to it.
    """
    width, rows = 640, 8192
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to("cuda", torch.bfloat16)
        for _ in range(3)
    ]
    bank = new_bank(layers, "cuda")
    spec = VariantSpec(key="train", training=True, rows=rows, row_shape=(width,), dtype=torch.bfloat16)
    bank.capture([spec])
    params = [param for layer in layers for param in layer.parameters()]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    eager = x
    for layer in layers:
        eager = layer(eager)
    want = [eager.detach(), *torch.autograd.grad(eager.square().sum(), [x, *params])]
    strangers: list[Tensor] = []
    for _ in range(4):
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # Takes whatever has become free, in pieces of any size that a workspace has.
        sizes = [1 << 21, 1 << 18, 1 << 10] * 8
        strangers += [torch.full((size,), torch.nan, device="cuda") for size in sizes]
        x.grad = None
        for param in params:
            param.grad = None
        with bank.micro_batch("train") as reason:
            assert reason is None
            out = bank(x)
        got = [out.detach().clone()]
        out.square().sum().backward()
        del out
        for grad, wanted in zip([*got, *(it.grad for it in (x, *params))], want, strict=True):
            assert_same_bits(grad, wanted, "a replay after the workspaces were cleared")
    assert all(bool(stranger.isnan().all()) for stranger in strangers)
    assert bank.counters()["replays"] == 4 * len(layers)
    bank.release()
