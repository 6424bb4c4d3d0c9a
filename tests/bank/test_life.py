# SPDX-License-Identifier: Apache-2.0
"""The life of a bank, its counters, and every way in which a call may be refused."""

from collections.abc import Callable

import pytest
import torch
from bank_pair import ROWS, WIDTH, Twin, blocks, run_eager, variant
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.decide.reasons import EagerReason

State = _C.BankState

ALLOWED = {
    (State.WARM_UP, State.CAPTURING),
    (State.CAPTURING, State.SEALED),
    (State.SEALED, State.CAPTURING),
    (State.SEALED, State.SUSPENDED),
    (State.SUSPENDED, State.SEALED),
}
PATHS = {
    State.WARM_UP: [],
    State.CAPTURING: [State.CAPTURING],
    State.SEALED: [State.CAPTURING, State.SEALED],
    State.SUSPENDED: [State.CAPTURING, State.SEALED, State.SUSPENDED],
    State.RELEASED: [State.RELEASED],
}


@pytest.mark.parametrize("start", list(PATHS), ids=lambda state: state.name)
def test_states_change_only_as_a_bank_lives(start: State) -> None:
    for target in PATHS:
        core = _C.GraphBank(torch.device("cpu"))
        for state in PATHS[start]:
            core.become(state)
        assert core.state is start or core.state == start
        if target == State.RELEASED or (start, target) in ALLOWED:
            core.become(target)
            assert core.state == target
        else:
            with pytest.raises(RuntimeError, match=r"bank cannot become"):
                core.become(target)
            assert core.state == start


def test_chains_are_added_during_warm_up_only(device: str) -> None:
    twin = Twin(device, blocks(1)).capture()
    with pytest.raises(RuntimeError, match=r"added during warm-up, this bank is sealed"):
        twin.bank.add_chain(blocks(1))


def test_a_chain_needs_a_module(device: str) -> None:
    with pytest.raises(ValueError, match=r"expected at least one module, got none"):
        Bank(device).add_chain([])


def test_before_capture_everything_runs_eager(device: str) -> None:
    twin = Twin(device, blocks())
    assert twin.step() is EagerReason.WARMING_UP
    assert twin.eager_calls() == {"WARMING_UP": 3}
    assert twin.bank.state == State.WARM_UP
    twin.capture()
    assert twin.step() is None
    assert twin.step(twin.input(3), "unknown variant") is EagerReason.WARMING_UP


def test_suspend_stops_replays_until_resume(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    pending = twin.forward()
    twin.bank.suspend()
    pending.backward()  # what has begun may end
    twin.check_state()
    del pending
    assert twin.step() is EagerReason.SUSPENDED
    with pytest.raises(RuntimeError, match=r"suspended bank cannot become capturing"):
        twin.capture(variant("more"))
    twin.bank.resume()
    assert twin.step() is None
    assert twin.eager_calls() == {"SUSPENDED": 3}


def test_release_runs_everything_eager_and_may_come_twice(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    twin.step()
    twin.bank.release()
    twin.bank.release()
    assert twin.bank.state == State.RELEASED
    assert twin.step() is EagerReason.RELEASED
    with pytest.raises(RuntimeError, match=r"released bank cannot become capturing"):
        twin.capture()


def test_a_backward_that_release_left_pending_raises(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    micro_batch = twin.forward()
    twin.bank.release()
    with pytest.raises(RuntimeError, match=r"released between the forward and the backward of site 2"):
        micro_batch.output.sum().backward()


def test_a_bank_that_nobody_holds_goes_quietly(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    twin.step()
    chain = twin.chain
    del twin.bank
    assert chain.begin("train") is EagerReason.RELEASED


def test_with_one_slot_a_second_micro_batch_runs_eager(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    first = twin.forward()
    second = twin.forward()
    assert (first.reason, second.reason) == (None, EagerReason.NO_FREE_SLOT)
    second.backward()
    first.backward()
    twin.check_state()
    del first, second
    assert twin.step() is None
    assert twin.eager_calls() == {"NO_FREE_SLOT": 3}


def test_graphs_with_collectives_name_who_holds_the_slot(device: str) -> None:
    twin = Twin(device, blocks(), holds_collectives=True).capture()
    first = twin.forward()
    with pytest.raises(
        RuntimeError, match=r"no slot is free.*collectives.*slot 0: 1 pending backward of site 0"
    ):
        twin.forward()
    assert not twin.chain.core.is_running
    first.backward()
    kept = first.output
    del first
    with pytest.raises(RuntimeError, match=r"Still held: slot 0: 1 tensor of site 2$"):
        twin.forward()
    del kept
    assert twin.forward().reason is None


def test_capture_needs_free_slots_and_names_who_holds_them(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    micro_batch = twin.forward()
    with pytest.raises(RuntimeError, match=r"every slot to be free; still held: slot 0: 1 pending backward"):
        twin.capture(variant("more"))
    assert twin.bank.state == State.SEALED
    micro_batch.backward()
    del micro_batch
    twin.capture(variant("more"))
    assert twin.step(key="more") is None


def test_a_micro_batch_cannot_begin_within_another_nor_end_twice(device: str) -> None:
    twin = Twin(device, blocks(1), num_slots=2).capture()
    core = twin.chain.core
    assert twin.chain.begin("train") is None
    assert core.is_running and core.slot_index == 0
    with pytest.raises(RuntimeError, match=r"previous micro-batch of this chain has not ended"):
        twin.chain.begin("train")
    core.end()
    assert not core.is_running and core.slot_index == -1
    with pytest.raises(RuntimeError, match=r"no micro-batch of this chain is running"):
        core.end()
    with pytest.raises(RuntimeError, match=r"site 0 was called outside a micro-batch"):
        twin.chain.sites[0](twin.input())
    assert core.all_free()


def test_a_micro_batch_ends_also_where_its_body_raises(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    with pytest.raises(KeyError), twin.chain.micro_batch("train"):
        twin.chain(twin.input())
        raise KeyError("of the caller")
    assert twin.chain.core.all_free()
    assert twin.step() is None


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.double(),
    "fewer rows": lambda x: x[:-1],
    "more rows": lambda x: torch.cat([x, x]),
    "width": lambda x: x[:, :-1].contiguous(),
    "dimensions": lambda x: x.unsqueeze(1),
    "strides": lambda x: x.t().contiguous().t(),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_an_input_of_another_signature_is_refused_before_any_state_changes(
    device: str, change: Callable[[Tensor], Tensor]
) -> None:
    twin = Twin(device, blocks()).capture()
    with twin.chain.micro_batch("train") as reason:
        assert reason is None
        held = twin.chain.core.describe_holders()
        assert twin.chain.sites[0](change(twin.input())) is NotImplemented
        assert twin.chain.sites[0](twin.input(), twin.input()) is NotImplemented
        assert twin.chain.core.describe_holders() == held
        twin.check_counters()
        assert twin.eager_calls() == {"SIGNATURE_CHANGED": 2}
        assert twin.chain.sites[0](twin.input()) is not NotImplemented
    assert twin.step() is None


def test_the_grad_mode_belongs_to_the_signature(device: str) -> None:
    twin = Twin(device, blocks()).capture(variant(), variant("eval", training=False))
    with torch.no_grad():
        assert twin.forward(key="train").reason is None
    assert twin.eager_calls() == {"SIGNATURE_CHANGED": 3}
    micro_batch = twin.forward(key="eval")
    micro_batch.backward()
    twin.check_state()
    del micro_batch
    assert twin.eager_calls() == {"SIGNATURE_CHANGED": 6}
    with torch.no_grad():
        assert twin.forward(key="eval", requires_grad=False).reason is None
    assert twin.eager_calls() == {"SIGNATURE_CHANGED": 6}
    assert twin.step() is None


def test_a_non_contiguous_input_runs_the_first_site_eager_and_the_others_as_graphs(device: str) -> None:
    twin = Twin(device, [nn.Linear(WIDTH, WIDTH), *blocks(2)]).capture()
    strided = twin.input().t().contiguous().t()
    with twin.chain.micro_batch("train"):
        out = twin.chain(strided)
    assert torch.equal(out, run_eager(twin.eager_layers, strided))
    assert twin.eager_calls() == {"SIGNATURE_CHANGED": 1}
    assert twin.bank.counters()["replays"] == 2


def test_an_input_on_another_device_is_refused(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    with twin.chain.micro_batch("train"):
        assert twin.chain.sites[0](torch.empty(ROWS, WIDTH, device="meta")) is NotImplemented
    assert twin.eager_calls() == {"SIGNATURE_CHANGED": 1}


def test_a_site_takes_tensors_by_position_only(device: str) -> None:
    twin = Twin(device, blocks(1)).capture()
    site = twin.chain.sites[0]
    assert site.index == 0
    with twin.chain.micro_batch("train"):
        with pytest.raises(TypeError, match=r"argument 0 is a int"):
            site(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"by position, got keywords"):
            site(hidden=twin.input())  # type: ignore[call-arg]
    assert twin.bank.counters()["calls"] == 0


def test_changed_numeric_settings_run_eager_and_are_named(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    index = twin.chain.variants["train"]
    assert twin.chain.core.changed_setting(index) == ""
    torch.use_deterministic_algorithms(False)
    assert twin.chain.core.changed_setting(index) == "deterministic algorithms"
    assert twin.step() is EagerReason.NUMERICS_CHANGED
    torch.use_deterministic_algorithms(True)
    with torch.autocast(device, torch.bfloat16):
        assert twin.chain.core.changed_setting(index) == "autocast"
        assert twin.forward().reason is EagerReason.NUMERICS_CHANGED
    try:
        torch.set_float32_matmul_precision("high")
        assert twin.chain.core.changed_setting(index) == "float32 matmul precision"
        assert twin.forward().reason is EagerReason.NUMERICS_CHANGED
    finally:
        torch.set_float32_matmul_precision("highest")
    assert twin.step() is None
    assert twin.eager_calls() == {"NUMERICS_CHANGED": 9}


def test_a_forward_that_would_break_the_nesting_runs_eager_and_is_counted(device: str) -> None:
    twin = Twin(device, blocks()).capture()
    first, second, _ = twin.chain.sites
    with twin.chain.micro_batch("train"):
        hidden = second(first(twin.input()))
        held = twin.chain.core.describe_holders()
        assert first(twin.input()) is NotImplemented
        assert second(twin.input()) is NotImplemented
        assert twin.chain.core.describe_holders() == held
        assert twin.eager_calls() == {"NESTING": 2}
        twin.check_counters()
    hidden.sum().backward()


def test_reasons_have_the_same_names_in_the_core() -> None:
    assert [reason.name for reason in EagerReason] == _C.EAGER_REASON_NAMES
    assert [int(reason) for reason in EagerReason] == list(range(len(EagerReason)))
