# SPDX-License-Identifier: Apache-2.0
"""Leases: who holds a slot, in what words, and when it is free."""

import random

import pytest

from megagraph import _C


def leased(num_sites: int = 4, *, training: bool = True) -> _C.Slot:
    slot = _C.Slot(0, num_sites)
    assert slot.lease(0, training)
    return slot


def test_a_slot_has_one_lease_at_a_time() -> None:
    slot = _C.Slot(0, 1)
    assert slot.is_free
    assert slot.lease(0, True)
    assert not slot.is_free
    assert not slot.lease(0, True)
    slot.end_micro_batch()
    assert slot.is_free
    assert slot.lease(1, False)


def test_a_training_lease_lasts_until_the_last_backward_is_done() -> None:
    slot = leased()
    assert slot.enter(0)
    assert slot.enter(1)
    slot.end_micro_batch()
    for index in (1, 0):
        assert not slot.is_free
        assert slot.leave(index)
        assert not slot.is_free  # the gradients are still on their way
        slot.node_done(index)
    assert slot.is_free


def test_the_backward_may_end_before_the_micro_batch_does() -> None:
    slot = leased()
    assert slot.enter(0)
    assert slot.leave(0)
    slot.node_done(0)
    assert not slot.is_free
    slot.end_micro_batch()
    assert slot.is_free


def test_a_dropped_site_holds_nothing_and_leaves_the_others_their_turn() -> None:
    slot = leased()
    for index in (0, 1, 2):
        assert slot.enter(index)
    slot.drop(1)
    assert not slot.leave(1)
    assert not slot.enter(1)  # site 2 is live
    assert slot.leave(2)
    slot.node_done(2)
    assert slot.enter(1)
    slot.drop(1)
    slot.drop(0)
    slot.end_micro_batch()
    assert slot.is_free


def test_a_tensor_over_a_boundary_holds_the_slot() -> None:
    slot = leased()
    assert slot.enter(0)
    slot.retain_tensor(0)
    slot.retain_tensor(0)
    assert slot.leave(0)
    slot.node_done(0)
    slot.end_micro_batch()
    slot.release_tensor(0)
    assert not slot.is_free
    slot.release_tensor(0)
    assert slot.is_free


def test_without_a_backward_a_site_is_live_while_its_output_may_be_read() -> None:
    slot = leased(training=False)
    assert slot.enter(1)
    slot.retain_tensor(1)
    assert not slot.enter(0)
    assert not slot.enter(1)
    assert slot.enter(2)
    slot.retain_tensor(2)
    slot.release_tensor(1)
    assert not slot.enter(1)  # the output of site 2 may still be read
    slot.release_tensor(2)
    assert slot.enter(0)


def test_a_refused_pass_changes_nothing() -> None:
    slot = leased()
    assert slot.enter(1)
    before = slot.describe_holders()
    assert not slot.enter(1)
    assert not slot.enter(0)
    assert not slot.leave(0)
    assert not slot.leave(2)
    assert slot.describe_holders() == before
    assert slot.leave(1)


def test_a_new_lease_starts_with_no_site_live() -> None:
    slot = leased(training=False)
    assert slot.enter(3)  # and then the forward failed: there is no tensor to count
    slot.end_micro_batch()
    assert slot.is_free
    assert slot.lease(0, True)
    assert slot.enter(0)


def test_holders_are_named_by_kind_and_site() -> None:
    slot = leased()
    assert slot.describe_holders() == "a micro-batch that has not ended"
    assert slot.enter(0)
    assert slot.enter(3)
    slot.retain_tensor(3)
    slot.retain_tensor(3)
    slot.end_micro_batch()
    assert slot.describe_holders() == (
        "1 pending backward of site 0, 1 pending backward of site 3, 2 tensors of site 3"
    )
    slot.release_tensor(3)
    slot.drop(0)
    assert slot.describe_holders() == "1 pending backward of site 3, 1 tensor of site 3"


def test_ending_what_never_began_is_an_error() -> None:
    slot = _C.Slot(0, 1)
    with pytest.raises(RuntimeError):
        slot.end_micro_batch()
    assert slot.is_free


def test_holders_are_counted_exactly_in_any_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        slot = leased(5)
        holders: list[tuple[str, int]] = []
        for index in sorted(rng.sample(range(5), rng.randint(1, 5))):
            assert slot.enter(index)
            holders.append(("node", index))
            for _ in range(rng.randint(0, 3)):
                slot.retain_tensor(index)
                holders.append(("tensor", index))
        holders.append(("micro-batch", 0))
        rng.shuffle(holders)
        for kind, index in holders:
            assert not slot.is_free
            if kind == "node":
                slot.drop(index)
            elif kind == "tensor":
                slot.release_tensor(index)
            else:
                slot.end_micro_batch()
        assert slot.is_free


def test_a_run_of_sites_enters_and_leaves_as_one() -> None:
    slot = leased()
    assert slot.enter(0, 2)
    slot.end_micro_batch()
    assert slot.describe_holders() == ", ".join(f"1 pending backward of site {index}" for index in range(3))
    assert not slot.enter(2, 3)
    assert not slot.leave(0, 1)
    assert slot.leave(0, 2)
    assert not slot.is_free
    slot.node_done(0, 2)
    assert slot.is_free


def test_a_run_may_follow_a_site_and_is_dropped_as_one() -> None:
    slot = leased()
    assert slot.enter(0)
    assert slot.enter(1, 3)
    assert not slot.leave(0)
    slot.drop(1, 3)
    assert slot.leave(0)
    assert slot.enter(1, 3)  # while the node of site 0 still runs
    slot.node_done(0)
    slot.drop(1, 3)
    slot.end_micro_batch()
    assert slot.is_free


def test_of_a_run_without_gradients_only_the_last_output_is_held() -> None:
    slot = leased(training=False)
    assert slot.enter(0, 2)
    slot.retain_tensor(2)
    assert not slot.enter(0, 2)
    slot.release_tensor(2)
    assert slot.enter(0, 2)
