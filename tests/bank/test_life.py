# SPDX-License-Identifier: Apache-2.0
"""The life of a bank and of its variants, its counters, and every way in which a call may be refused."""

import dataclasses
import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from bank_pair import ROWS, Block, Pair, blocks, new_bank, variant
from torch import Tensor

from megagraph._C import BankState, OpTrace
from megagraph.bank.bank import Bank
from megagraph.bank.sites import EagerPart
from megagraph.reasons import EagerReason


def test_a_bank_needs_a_module_and_a_slot_and_slots_that_face_each_other_are_two(device: str) -> None:
    with pytest.raises(ValueError, match=r"expected at least one module, got none"):
        Bank([], device)
    with pytest.raises(ValueError, match=r"at least one slot, got 0"):
        Bank(blocks(1), device, num_slots=0)
    with pytest.raises(ValueError, match="two slots face each other"):
        new_bank([Block().to(device)], device, num_slots=3, facing=[[0], [1], [1]])
    part = EagerPart(name="part", module=Block(), forward=lambda _module, hidden: hidden)
    with pytest.raises(ValueError, match="expected at least one module, got 1 parts that stay eager"):
        Bank([part], device)


def test_release_runs_everything_eager_also_within_a_micro_batch_and_may_come_twice(pair: Pair) -> None:
    """Bug: the next site raised `vector::_M_range_check`."""
    pair.step()
    with pair.bank.micro_batch("train"):
        first = pair.bank.sites[0](pair.input())
        pair.bank.release()
        assert pair.bank.sites[1](first) is NotImplemented
    assert pair.eager_calls() == {"RELEASED": 1}
    del first
    pair.bank.release()
    assert pair.bank.state == BankState.RELEASED
    assert pair.step() is EagerReason.RELEASED
    with pytest.raises(RuntimeError, match=r"released bank cannot become capturing"):
        pair.capture()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_backward_after_the_end_of_its_bank_raises(pair: Pair, is_held: bool) -> None:
    """Also of one that nobody holds any more, which goes quietly."""
    pending = pair.forward()
    if is_held:
        pair.bank.release()
    else:
        del pair.bank
        gc.collect()
    with pytest.raises(RuntimeError, match=r"released between the forward and the backward of site 2"):
        pending.backward()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_bank_that_goes_while_a_backward_runs_lets_it_come_to_its_end(pair: Pair, is_dropped: bool) -> None:
    """Bug: the process died. A release is an error then, wherever it comes from."""
    bank, told = [pair.bank], list[int]()

    def done(first: int, _last: int) -> None:
        if is_dropped:
            bank.clear()
            gc.collect()
        else:
            with pytest.raises(RuntimeError, match="a pass of this bank's graphs is running"):
                bank[0].release()
        told.append(first)

    pair.bank.set_listener(lambda: True, done, print, [2, 1, 0])
    pending = pair.forward()
    if is_dropped:
        del pair.bank
    pending.backward()
    assert told == [2, 1, 0]


def test_graphs_with_collectives_wait_a_moment_for_a_tensor_and_name_who_keeps_it(device: str) -> None:
    """Bug: threads of gloo let go of what they have sent a little after everybody has been told."""
    pair = Pair(device, blocks(), run_eager_alike=lambda *_where: None).capture()
    micro_batch = pair.forward()
    micro_batch.backward()
    kept = [micro_batch.output]
    del micro_batch
    told = r"no slot is free.*collectives.*held: slot 0: 1 tensor of site 2$"
    with pytest.raises(RuntimeError, match=told):
        pair.forward()
    assert pair.bank.slot_index == -1
    other = threading.Timer(0.05, kept.clear)
    other.start()
    assert pair.forward().reason is None
    other.join()


def test_who_captures_or_drops_needs_free_slots_and_is_told_who_holds_them(pair: Pair) -> None:
    micro_batch = pair.forward()
    with pytest.raises(RuntimeError, match=r"every slot to be free; still held: slot 0: 1 pending backward"):
        pair.capture(variant("more"))
    with pytest.raises(RuntimeError, match="still held: "):
        pair.bank.drop(["train"])
    assert pair.bank.state == BankState.SEALED
    micro_batch.backward()
    del micro_batch
    pair.capture(variant("more"))
    assert pair.step() is None and pair.step(key="more") is None
    pair.bank.drop(["train", "more"])
    pair.bank.drop(["train", "never captured"])
    assert pair.bank.num_graphs == 0


def test_what_no_caller_may_do_is_an_error(device: str) -> None:
    """A micro-batch cannot begin within another, nor end twice; a site takes tensors by position only."""
    pair = Pair(device, blocks(1), num_slots=2).capture()
    bank, index, (site,) = pair.bank, pair.bank.variants["train"], pair.bank.sites
    assert bank.begin(index, [], True) is None
    assert bank.slot_index == 0
    with pytest.raises(RuntimeError, match=r"previous micro-batch of this bank has not ended"):
        bank.begin(index, [], True)
    bank.end()
    assert bank.slot_index == -1
    with pytest.raises(RuntimeError, match=r"no micro-batch of this bank is running"):
        bank.end()
    with pytest.raises(RuntimeError, match=r"site 0 was called outside a micro-batch"):
        site(pair.input())
    assert bank.all_free() and site.index == 0
    with pair.bank.micro_batch("train"):
        with pytest.raises(TypeError, match=r"argument 0 is a int"):
            site(3)
        with pytest.raises(TypeError, match=r"by position, got keywords"):
            site(hidden=pair.input())
    assert bank.counters()["calls"] == 0


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    # No wider than the buffer: staged in spite of its dtype, it would overrun nothing, and show here.
    "dtype": lambda x: x.half(),
    "dtype of the same size": lambda x: x.to(torch.int32),
    "fewer rows": lambda x: x[:-1],
    "more rows": lambda x: torch.cat([x, x]),
    "width": lambda x: x[:, :-1].contiguous(),
    "dimensions": lambda x: x.unsqueeze(1),
    "strides": lambda x: x.t().contiguous().t(),
    "device": lambda x: torch.empty_like(x, device="meta"),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_an_input_of_another_signature_changes_no_state(pair: Pair, change: Any) -> None:
    with pair.bank.micro_batch("train") as reason:
        assert reason is None
        held = pair.bank.holders()
        assert pair.bank.sites[0](change(pair.input())) is NotImplemented
        assert pair.bank.sites[0](pair.input(), pair.input()) is NotImplemented
        assert pair.bank.holders() == held
        pair.check_counters()
        assert pair.eager_calls() == {"SIGNATURE_CHANGED": 2}
        assert pair.bank.sites[0](pair.input()) is not NotImplemented
    assert pair.step() is None


def test_the_grad_mode_belongs_to_the_signature(device: str) -> None:
    pair = Pair(device, blocks()).capture(variant(), variant("even", training=False))
    with torch.no_grad():
        assert pair.forward(key="train").reason is None
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 3}
    micro_batch = pair.forward(key="even")
    micro_batch.backward()
    pair.check_state()
    del micro_batch
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 6}
    assert pair.evaluate() is None
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 6}
    assert pair.step() is None


@pytest.mark.parametrize("main_grad", [False, True])
def test_the_others_replay_and_the_dropped_one_is_captured_again(device: str, main_grad: bool) -> None:
    pair = Pair(device, blocks(), main_grad=main_grad)
    both = variant(), variant("even", training=False)
    pair.capture(*both)
    for _ in range(3):
        assert pair.step() is None and pair.evaluate() is None
        pair.bank.drop(["train"])
        assert pair.bank.num_graphs == 3
        assert pair.forward().reason is EagerReason.WARMING_UP and pair.evaluate() is None
        pair.update_weights()
        pair.capture(both[0])
        assert pair.bank.num_graphs == 9
    assert pair.step() is None and pair.evaluate() is None
    assert pair.eager_calls() == {"WARMING_UP": 9}
    torch.use_deterministic_algorithms(False)
    assert pair.forward().reason is EagerReason.NUMERICS_CHANGED
    pair.capture(both[0])
    assert pair.bank.num_graphs == 9
    assert pair.forward().reason is None, "it has the later graphs"


@pytest.mark.gpu
def test_the_next_capture_takes_the_memory_of_what_was_dropped() -> None:
    layers = [Block(256).to("cuda") for _ in range(3)]
    bank = new_bank(layers, "cuda")
    train = variant(rows=1 << 14, row_shape=(256,))
    bank.capture([train, dataclasses.replace(train, key="eval", training=False)])
    held = bank.pool_bytes()
    assert held > ROWS
    for _ in range(5):
        bank.drop(["train"])
        bank.capture([train])
    assert bank.pool_bytes() <= 1.1 * held


# -- bugs that were found once -----------------------------------------------------------------------


def test_an_eager_op_between_two_sites_changes_no_bit(device: str) -> None:
    """Its result was staged into the next site's input, which is the buffer that it was computed from."""
    pair = Pair(device, blocks(2)).capture()

    def squares_between(steps: Sequence[Any], x: Tensor) -> Tensor:
        first = steps[0](x)
        between = first * first  # saves what it was given
        out = steps[1](between)
        return pair.layers[1](between) if out is NotImplemented else out

    ours, eager = (partial(squares_between, steps) for steps in (pair.bank.sites, pair.eager_layers))
    for _ in range(3):
        pair.step(ours=ours, eager=eager)


def test_a_bank_does_not_go_on_watching_every_op(device: str) -> None:
    """Each host-backend capture left its op trace on; a second one doubled the names it recorded."""
    pairs = [Pair(device, blocks(1)).capture() for _ in range(3)]
    trace = OpTrace()
    torch.zeros(2).neg()
    assert trace.last_op == "aten::neg"
    del pairs
