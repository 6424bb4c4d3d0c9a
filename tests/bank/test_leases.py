# SPDX-License-Identifier: Apache-2.0
"""Leased tensors: whoever can still read a boundary holds its slot, and nobody else does."""

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from bank_pair import ROWS, WIDTH, Pair, blocks, run_eager, variant
from same_bits import assert_same_bits
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Leases end by reference counts alone."""
    gc.disable()
    yield
    gc.enable()


def test_a_finished_backward_frees_the_slot_once_the_output_is_gone(pair: Pair) -> None:
    micro_batch = pair.forward()
    assert pair.bank.holders() == (
        "slot 0: 1 pending backward of site 0, 1 pending backward of site 1, "
        "1 pending backward of site 2, 1 tensor of site 2"
    )
    micro_batch.backward()
    assert pair.bank.holders() == "slot 0: 1 tensor of site 2"
    del micro_batch
    assert pair.bank.all_free() and pair.bank.last_leases() == [], "a single slot has none to show"


def emptied(out: Tensor) -> None:
    out.untyped_storage().resize_(0)


def replaced(out: Tensor) -> None:
    out.data = torch.empty(1, dtype=out.dtype, device=out.device)


@pytest.mark.parametrize("deallocate", [emptied, replaced])
def test_deallocating_an_output_frees_the_slot_and_not_the_buffer(
    pair: Pair, deallocate: Callable[[Tensor], None]
) -> None:
    """As Megatron's pipeline does between forward and backward. A shallow copy freed the buffer."""
    for _ in range(3):
        micro_batch = pair.forward()
        deallocate(micro_batch.output)
        assert "tensor" not in pair.bank.holders()
        grad = torch.randn_like(micro_batch.eager_output)
        # Megatron's custom_backward: the engine itself, since the shape is gone.
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(micro_batch.output,),
            grad_tensors=(grad.clone(),),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        assert pair.bank.all_free()
        micro_batch.eager_output.backward(grad)
        assert_same_bits(micro_batch.input.grad, micro_batch.eager_input.grad, "gradient of the input")
        pair.check_state()


def test_views_and_aliases_of_an_output_hold_the_slot(pair: Pair) -> None:
    makers: list[Callable[[Tensor], object]] = [
        lambda out: out[1:3],
        lambda out: out.detach(),
        lambda out: out.data,
        lambda out: out.view(-1),
        lambda out: out.untyped_storage(),
        lambda out: out.unbind(0)[0],
        lambda out: (out**2).sum(),  # autograd has saved it
        lambda out: out,
    ]
    for make in makers:
        micro_batch = pair.forward()
        assert micro_batch.reason is None
        held = make(micro_batch.output)
        del micro_batch
        assert "1 tensor of site 2" in pair.bank.holders()
        del held
        assert pair.bank.all_free()


def test_an_output_is_a_plain_tensor(pair: Pair) -> None:
    micro_batch = pair.forward()
    out = micro_batch.output
    assert out._base is None and not out.is_leaf and out.requires_grad
    assert type(out) is torch.Tensor and out.is_contiguous() and out.storage_offset() == 0
    assert out._version == 0
    assert out.untyped_storage().nbytes() == ROWS * WIDTH * 4
    assert out.grad_fn is not None and out.grad_fn.name() == "MegagraphReplay"


def test_the_gradient_of_a_leaf_input_does_not_hold_the_slot(pair: Pair) -> None:
    first = pair.forward()
    first.backward()
    kept = first.input.grad
    del first
    assert pair.bank.all_free()
    assert kept is not None
    before = kept.clone()
    pair.step()
    assert torch.equal(kept, before)


def test_a_gradient_that_somebody_keeps_holds_the_slot_and_its_bits(device: str) -> None:
    pair = Pair(device, blocks(), num_slots=2).capture()
    kept: list[Tensor] = []
    x = pair.input().requires_grad_()
    scaled = x * 2
    scaled.register_hook(kept.append)
    with pair.bank.micro_batch("train"):
        out = pair.bank(scaled)
    out.sum().backward()
    before = kept[0].clone()
    del out, scaled
    assert pair.bank.holders() == "slot 0: 1 tensor of site 0"
    for layer in pair.layers:
        layer.zero_grad()
    for _ in range(3):
        assert pair.step() is None
    assert torch.equal(kept[0], before)
    kept.clear()
    assert pair.bank.all_free()


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_autograd_grad_has_the_same_bits_that_no_later_backward_overwrites(
    device: str, main_grad: bool
) -> None:
    """Bug: of parameters the graph's own buffer was handed out."""
    pair = Pair(device, blocks(), main_grad=main_grad, num_slots=2).capture()
    params = [
        [*nn.ModuleList(side).parameters()] if not main_grad else []
        for side in (pair.layers, pair.eager_layers)
    ]
    for _ in range(3):
        micro_batch = pair.forward()
        grad = torch.randn_like(micro_batch.eager_output)
        got = torch.autograd.grad(micro_batch.output, [micro_batch.input, *params[0]], grad)
        want = torch.autograd.grad(micro_batch.eager_output, [micro_batch.eager_input, *params[1]], grad)
        assert micro_batch.input.grad is None and all(param.grad is None for param in pair.params())
        del micro_batch
        assert pair.bank.all_free()
        pair.forward().backward()
        assert_same_bits(got, want, "gradients, after another micro-batch")
        for layer in [*pair.layers, *pair.eager_layers]:
            layer.zero_grad()


def test_a_second_backward_is_an_error(pair: Pair) -> None:
    micro_batch = pair.forward()
    micro_batch.output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"site 2 was asked for a second backward"):
        micro_batch.output.sum().backward()
    del micro_batch
    assert pair.bank.all_free()


def test_a_backward_out_of_order_is_an_error_that_spoils_nothing(pair: Pair) -> None:
    first, second, _ = pair.bank.sites
    with pair.bank.micro_batch("train"):
        hidden = first(pair.input().requires_grad_())
        out = second(hidden.detach().requires_grad_())
    with pytest.raises(RuntimeError, match=r"backward of site 0 out of order.*1 pending backward of site 1"):
        hidden.sum().backward()
    out.sum().backward()
    del hidden, out
    assert pair.bank.all_free()
    for layer in pair.layers:
        layer.zero_grad()
    assert pair.step() is None


def test_leaving_a_micro_batch_in_its_middle_spoils_nothing(pair: Pair) -> None:
    for num_sites in (0, 1, 2):
        with pair.bank.micro_batch("train"):
            hidden = pair.input().requires_grad_()
            for site in pair.bank.sites[:num_sites]:
                hidden = site(hidden)
        del hidden
        assert pair.bank.all_free()
        assert pair.step() is None


def test_some_sites_may_run_backward(pair: Pair) -> None:
    def ours(x: Tensor) -> Tensor:
        first, second, third = pair.bank.sites
        out = second(first(x))
        third(out)  # and drops what it makes
        return out

    pair.step(ours=ours, eager=lambda x: run_eager(pair.eager_layers[:2], x))


def test_a_long_bank_is_dropped_without_recursion(device: str) -> None:
    pair = Pair(device, [nn.Tanh() for _ in range(300)]).capture()
    micro_batch = pair.forward()
    del micro_batch
    assert pair.bank.all_free()
    assert pair.step() is None


def test_a_bank_knows_when_its_slots_were_last_leased(device: str) -> None:
    pair = Pair(device, blocks(1), num_slots=2).capture()
    first = pair.forward()
    second = pair.forward()
    (slot, training, begin, end), held = pair.bank.last_leases()
    assert (slot, training, end) == (0, True, 0)
    assert abs(begin / 1e9 - time.time()) < 60
    assert held[0] == 1 and held[2] >= begin
    second.backward()
    del second
    (*_, still), ended = pair.bank.last_leases()
    assert still == 0 and ended[3] > ended[2]
    first.backward()
    del first
    (_, freed) = (lease[3] for lease in pair.bank.last_leases()[::-1])
    assert freed > ended[3]


@pytest.mark.parametrize("others", [255, 256])
def test_a_lease_is_forgotten_by_the_256th_after_it(device: str, others: int) -> None:
    """Also where it ends late; and whoever has its place keeps the end it has."""
    pair = Pair(device, [nn.Tanh()], num_slots=2).capture(variant(training=False))
    with torch.no_grad():
        late = pair.forward(requires_grad=False)
        for _ in range(others):
            pair.forward(requires_grad=False)
    held, *rest = pair.bank.last_leases()
    assert len(rest) == 255 and {slot for slot, *_ in rest} == {1}
    assert [lease[2] for lease in rest] == sorted(lease[2] for lease in rest)
    assert (held[0], held[3]) == (0, 0) if others == 255 else held[0] == 1
    del late
    ended, *others_then = pair.bank.last_leases()
    assert others_then == rest
    assert ended[:3] == held[:3] and (ended[3] > rest[-1][3] if others == 255 else ended == held)
