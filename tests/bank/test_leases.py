# SPDX-License-Identifier: Apache-2.0
"""Leased tensors: whoever can still read a boundary holds its slot, and nobody else does."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from bank_pair import ROWS, WIDTH, MicroBatch, Twin, assert_same_bits, blocks, run_eager, variant
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Leases end by reference counts alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def twin(device: str) -> Twin:
    return Twin(device, blocks()).capture()


def test_a_dropped_output_frees_the_slot(twin: Twin) -> None:
    for _ in range(3):
        micro_batch = twin.forward()
        assert micro_batch.reason is None
        assert not twin.chain.core.all_free()
        del micro_batch
        assert twin.chain.core.all_free()


def test_a_finished_backward_frees_the_slot_once_the_output_is_gone(twin: Twin) -> None:
    micro_batch = twin.forward()
    assert twin.chain.core.describe_holders() == (
        "slot 0: 1 pending backward of site 0, 1 pending backward of site 1, "
        "1 pending backward of site 2, 1 tensor of site 2"
    )
    micro_batch.backward()
    assert twin.chain.core.describe_holders() == "slot 0: 1 tensor of site 2"
    del micro_batch
    assert twin.chain.core.all_free()


def test_without_gradients_the_output_alone_holds_the_slot(device: str) -> None:
    twin = Twin(device, blocks()).capture(variant(training=False))
    with torch.no_grad():
        out = twin.forward(requires_grad=False).output
    assert twin.chain.core.describe_holders() == "slot 0: 1 tensor of site 2"
    del out
    assert twin.chain.core.all_free()


def emptied(out: Tensor) -> None:
    out.untyped_storage().resize_(0)


def replaced(out: Tensor) -> None:
    out.data = torch.empty(1, dtype=out.dtype, device=out.device)


@pytest.mark.parametrize("deallocate", [emptied, replaced])
def test_deallocating_an_output_frees_the_slot_and_not_the_buffer(
    twin: Twin, deallocate: Callable[[Tensor], None]
) -> None:
    """As Megatron's pipeline does between forward and backward. A shallow copy freed the buffer."""
    for _ in range(3):
        micro_batch = twin.forward()
        deallocate(micro_batch.output)
        assert "tensor" not in twin.chain.core.describe_holders()
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
        assert twin.chain.core.all_free()
        micro_batch.eager_output.backward(grad)
        assert_same_bits(micro_batch.input.grad, micro_batch.eager_input.grad, "gradient of the input")
        twin.check_state()


def test_views_and_aliases_of_an_output_hold_the_slot(twin: Twin) -> None:
    makers: list[Callable[[Tensor], object]] = [
        lambda out: out[1:3],
        lambda out: out.detach(),
        lambda out: out.data,
        lambda out: out.view(-1),
        lambda out: out.untyped_storage(),
        lambda out: out.unbind(0)[0],
    ]
    for make in makers:
        held = make(twin.forward().output)
        assert "1 tensor of site 2" in twin.chain.core.describe_holders()
        del held
        assert twin.chain.core.all_free()


def test_what_eager_autograd_saved_of_an_output_holds_the_slot(twin: Twin) -> None:
    squared = (twin.forward().output ** 2).sum()
    assert "1 tensor of site 2" in twin.chain.core.describe_holders()
    squared.backward()
    assert twin.chain.core.all_free()


def test_an_output_is_a_plain_tensor(twin: Twin) -> None:
    micro_batch = twin.forward()
    out = micro_batch.output
    assert out._base is None and not out.is_leaf and out.requires_grad
    assert type(out) is torch.Tensor and out.is_contiguous() and out.storage_offset() == 0
    assert out._version == 0
    assert out.untyped_storage().nbytes() == ROWS * WIDTH * 4
    assert out.grad_fn is not None and out.grad_fn.name() == "MegagraphReplay"


def test_the_gradient_of_a_leaf_input_does_not_hold_the_slot(twin: Twin) -> None:
    first = twin.forward()
    first.backward()
    kept = first.input.grad
    del first
    assert twin.chain.core.all_free()
    assert kept is not None
    before = kept.clone()
    twin.step()
    assert torch.equal(kept, before)


def test_a_gradient_that_somebody_keeps_holds_the_slot_and_its_bits(device: str) -> None:
    twin = Twin(device, blocks(), num_slots=2).capture()
    kept: list[Tensor] = []
    x = twin.input().requires_grad_()
    scaled = x * 2
    scaled.register_hook(kept.append)
    with twin.chain.micro_batch("train"):
        out = twin.chain(scaled)
    out.sum().backward()
    before = kept[0].clone()
    del out, scaled
    assert twin.chain.core.describe_holders() == "slot 0: 1 tensor of site 0"
    for layer in twin.layers:
        layer.zero_grad()
    for _ in range(3):
        assert twin.step() is None
    assert torch.equal(kept[0], before)
    kept.clear()
    assert twin.chain.core.all_free()


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_autograd_grad_of_the_input_has_the_same_bits(device: str, main_grad: bool) -> None:
    twin = Twin(device, blocks(), main_grad=main_grad, num_slots=2).capture()
    for _ in range(3):
        micro_batch = twin.forward()
        grad = torch.randn_like(micro_batch.eager_output)
        (got,) = torch.autograd.grad(micro_batch.output, micro_batch.input, grad)
        (want,) = torch.autograd.grad(micro_batch.eager_output, micro_batch.eager_input, grad)
        assert_same_bits(got, want, "gradient of the input")
        assert micro_batch.input.grad is None
        assert all(param.grad is None for layer in twin.layers for param in layer.parameters())
        del micro_batch
        assert twin.chain.core.all_free()
        before = got.clone()
        twin.forward().backward()
        assert torch.equal(got, before)
        for layer in [*twin.layers, *twin.eager_layers]:
            layer.zero_grad()


def test_a_second_backward_is_an_error(twin: Twin) -> None:
    micro_batch = twin.forward()
    micro_batch.output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"site 2 was asked for a second backward"):
        micro_batch.output.sum().backward()
    del micro_batch
    assert twin.chain.core.all_free()


def backward_out_of_order(twin: Twin) -> None:
    first, second, _ = twin.chain.sites
    with twin.chain.micro_batch("train"):
        hidden = first(twin.input().requires_grad_())
        out = second(hidden.detach().requires_grad_())
    with pytest.raises(RuntimeError, match=r"backward of site 0 out of order.*1 pending backward of site 1"):
        hidden.sum().backward()
    out.sum().backward()


def test_a_backward_out_of_order_is_an_error_that_spoils_nothing(twin: Twin) -> None:
    backward_out_of_order(twin)
    assert twin.chain.core.all_free()
    for layer in twin.layers:
        layer.zero_grad()
    assert twin.step() is None


def test_a_slot_that_is_free_again_changes_no_bit_of_what_was_kept(device: str) -> None:
    """Freed boundaries are filled with NaN."""
    twin = Twin(device, blocks(), num_slots=2, main_grad=True).capture()
    kept: list[MicroBatch] = []
    for step in range(6):
        micro_batch = twin.forward()
        assert micro_batch.reason is None
        if step % 2:
            micro_batch.backward()
        kept = [micro_batch]
        twin.forward()  # takes the other slot, and drops it
        kept[0].check_outputs()
        if not step % 2:
            kept[0].backward()
        twin.check_state()
        kept.clear()
        del micro_batch


def test_leaving_a_micro_batch_in_its_middle_spoils_nothing(twin: Twin) -> None:
    for num_sites in (0, 1, 2):
        with twin.chain.micro_batch("train"):
            hidden = twin.input().requires_grad_()
            for site in twin.chain.sites[:num_sites]:
                hidden = site(hidden)
        del hidden
        assert twin.chain.core.all_free()
        assert twin.step() is None


def test_part_of_a_chain_may_run_backward(twin: Twin) -> None:
    hidden = twin.input()
    x, eager_x = (hidden.clone().requires_grad_() for _ in range(2))
    with twin.chain.micro_batch("train"):
        part = twin.chain.sites[1](twin.chain.sites[0](x))
        del_me = twin.chain.sites[2](part)
    del del_me
    eager = run_eager(twin.eager_layers[:2], eager_x)
    assert_same_bits(part, eager, "output")
    part.backward(torch.ones_like(part))
    eager.backward(torch.ones_like(eager))
    assert_same_bits(x.grad, eager_x.grad, "gradient of the input")
    twin.check_state()


def test_a_long_chain_is_dropped_without_recursion(device: str) -> None:
    twin = Twin(device, [nn.Tanh() for _ in range(300)]).capture()
    micro_batch = twin.forward()
    del micro_batch
    assert twin.chain.core.all_free()
    assert twin.step() is None
