# SPDX-License-Identifier: Apache-2.0
"""A chain that replays is one call and one autograd node; else it is one of each for every site."""

import pytest
import torch
from bank_twin import Twin, assert_same_bits, blocks
from torch import Tensor

from megagraph import _C
from megagraph.dispatch import EagerReason

SITES = 4


def nodes_of(out: Tensor) -> int:
    """How many replayed runs lie behind a tensor, in a row."""
    node, count = out.grad_fn, 0
    while node is not None and node.name() == "MegagraphReplay":
        count += 1
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return count


def test_all_sites_are_one_run(device: str) -> None:
    twin = Twin(device, blocks(SITES)).capture()
    micro_batch = twin.forward()
    assert nodes_of(micro_batch.output) == 1
    micro_batch.backward()
    twin.check_state()
    assert twin.bank.counters()["replays"] == SITES


def test_site_by_site_has_the_same_bits(device: str) -> None:
    twin = Twin(device, blocks(SITES), main_grad=True).capture()
    run = twin.chain.run
    for calls_sites in (False, True, False):
        twin.chain.run = (lambda hidden: NotImplemented) if calls_sites else run  # type: ignore[assignment]
        micro_batch = twin.forward()
        assert nodes_of(micro_batch.output) == (SITES if calls_sites else 1)
        micro_batch.backward()
        del micro_batch  # and with it the slot
        twin.check_state()
    assert twin.bank.counters()["replays"] == 3 * SITES


@pytest.mark.parametrize("eager", [0, 1, SITES - 1])
def test_a_chain_with_an_eager_site_is_no_run(device: str, eager: int) -> None:
    twin = Twin(device, blocks(SITES))
    twin.bank.skip(twin.chain, eager, EagerReason.SCOPE_UNSUPPORTED)
    twin.capture()
    with twin.chain.micro_batch("train") as reason:
        assert reason is None
        assert twin.chain.run(twin.input()) is NotImplemented
    assert twin.eager_calls() == {}  # a run that cannot be is not counted, its sites are
    twin.step()
    assert twin.eager_calls() == {"SCOPE_UNSUPPORTED": 1}


def test_a_run_that_does_not_fit_is_counted_once(device: str) -> None:
    twin = Twin(device, blocks(SITES)).capture()
    with twin.chain.micro_batch("train"), torch.no_grad():
        assert twin.chain.run(twin.input()) is NotImplemented
        out = twin.chain(twin.input())
    assert twin.eager_calls() == {"SIGNATURE_CHANGED": SITES}
    del out
    assert twin.step() is None


def test_a_run_outside_of_a_micro_batch_is_for_its_sites_to_refuse(device: str) -> None:
    twin = Twin(device, blocks(SITES)).capture()
    assert twin.chain.run(twin.input()) is NotImplemented
    with pytest.raises(RuntimeError, match="outside a micro-batch"):
        twin.chain(twin.input())


def test_finished_backwards_are_told_from_the_last_site_to_the_first(device: str) -> None:
    twin = Twin(device, blocks(SITES), main_grad=True).capture()
    told: list[int] = []
    twin.chain.chunk.set_listener(lambda: True, told.append)
    twin.step()
    assert told == list(reversed(range(SITES)))


def test_a_run_of_one_site_is_that_site(device: str) -> None:
    twin = Twin(device, blocks(1)).capture()
    assert isinstance(twin.chain.run, _C.Site)
    for _ in range(3):
        assert twin.step() is None
    assert twin.bank.counters()["replays"] == 3


def test_a_backward_for_the_input_alone_has_the_same_bits(device: str) -> None:
    twin = Twin(device, blocks(SITES)).capture()
    micro_batch = twin.forward()
    grad = torch.randn_like(micro_batch.eager_output)
    (ours,) = torch.autograd.grad(micro_batch.output, micro_batch.input, grad)
    (eager,) = torch.autograd.grad(micro_batch.eager_output, micro_batch.eager_input, grad)
    assert_same_bits(ours, eager, "gradient of the input")
    assert all(param.grad is None for layer in twin.layers for param in layer.parameters())
