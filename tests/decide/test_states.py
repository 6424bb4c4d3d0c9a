# SPDX-License-Identifier: Apache-2.0
"""States have numbers, alike on all ranks, and those that never come back are forgotten."""

import pytest

from megagraph._C import States
from megagraph.decide.reasons import EagerReason


def test_numbers_come_in_the_order_in_which_states_are_met() -> None:
    states = States(1)
    for fingerprint, settings, number, is_new in (
        (7, 1, 0, True),
        (8, 1, 1, True),
        (7, 1, 0, False),
        (7, 2, 2, True),
    ):
        assert states.agree(states.local_state(0, fingerprint, settings))
        assert (states.current, states.is_new) == (number, is_new)
    assert states.of_call(8) == 3  # under the settings of now
    assert states.under(1) == 1
    assert states.eager_reason(0, [2]) is EagerReason.NUMERICS_CHANGED
    assert states.eager_reason(0, [1]) is EagerReason.STATE_CHANGED
    assert states.oldest_first()[-1] == 1


def test_ranks_have_one_number_for_what_they_are_in_together() -> None:
    ranks = [States(2), States(2)]

    def meet(*fingerprints: int) -> tuple[list[int], list[bool]]:
        said = [
            states.local_state(rank, value, 1)
            for rank, (states, value) in enumerate(zip(ranks, fingerprints, strict=True))
        ]
        largest = [max(values) for values in zip(*said, strict=True)]
        agreed = [rank.agree(largest) for rank in ranks]
        return [rank.current for rank in ranks], agreed

    assert meet(10, 20) == ([0, 0], [True, True])
    assert meet(10, 21) == ([1, 1], [True, True])  # on one rank alone
    assert meet(11, 21) == ([2, 2], [True, True])
    assert meet(10, 20) == ([0, 0], [True, True])
    assert ranks[0].eager_reason(0, [1]) is EagerReason.GROUP_DISAGREED
    assert ranks[1].eager_reason(0, [1]) is EagerReason.STATE_CHANGED
    # Inside a step: what all of them do is known from before, what is new has no graphs.
    assert [rank.of_call(value) for rank, value in zip(ranks, (11, 21), strict=True)] == [2, 2]
    assert [rank.of_call(value) for rank, value in zip(ranks, (12, 22), strict=True)] == [-1, -1]
    assert meet(10, 20) == ([0, 0], [True, True])
    ranks[0].of_call(11)  # on one rank alone
    ranks[1].of_call(20)
    assert meet(10, 20) == ([0, 0], [False, False])


def test_states_that_never_come_back_are_forgotten_and_those_with_graphs_are_not() -> None:
    states = States(1)
    gone: set[int] = set()
    for fingerprint in range(200):
        states.agree(states.local_state(0, fingerprint, 1))
        if states.has_many():
            gone |= states.forget_oldest(keep={0})
    assert len(states.oldest_first()) == 64 and gone == set(range(1, 137))
    states.agree(states.local_state(0, 1, 1))
    assert states.is_new
    states.agree(states.local_state(0, 0, 1))
    assert not states.is_new and states.current == 0


def test_the_state_of_now_is_kept_where_all_others_have_graphs() -> None:
    """It is the oldest one without graphs, and the step that begins is in it."""
    states = States(1)
    for fingerprint in range(65):
        states.agree(states.local_state(0, fingerprint, 1))
    assert states.has_many() and states.forget_oldest(keep=set(range(64))) == set()
    states.rename(100)
    states.agree(states.local_state(0, 100, 1))
    assert not states.is_new and states.current == 64


def test_a_state_has_no_name_of_before_other_modules_counted() -> None:
    """Bug: a layer's own forward that came back, once the layer had graphs again, was taken for none."""
    states = States(1)
    states.agree(states.local_state(0, 7, 1))
    states.rename(8)
    states.agree(states.local_state(0, 8, 1))
    assert states.current == 0 and states.of_call(7) == 1
    states.agree(states.local_state(0, 7, 1))
    assert states.current == 1


@pytest.mark.parametrize(("size", "run_alike"), [(1, True), (2, True), (2, False)])
def test_a_state_that_calls_alone_are_in_is_not_the_oldest(size: int, run_alike: bool) -> None:
    """But ranks of other packs call in another order, and have to forget the same ones."""
    states = States(size, run_alike=run_alike)
    for fingerprint in (7, 8):
        states.agree(states.local_state(0, fingerprint, 1))
    assert states.of_call(7) == 0
    assert states.oldest_first() == ([1, 0] if run_alike else [0, 1])


def test_states_that_are_forgotten_are_new_when_they_come_back() -> None:
    """Each rank forgets its own names of them, too, or what it remembers would grow for ever."""
    states = States(1)
    for fingerprint in range(100):
        states.agree(states.local_state(0, fingerprint, 1))
        states.forget_oldest(keep=set())
    first = states.local_state(0, 0, 1)
    assert first[2] == 101  # a number of its own again
    states.agree(first)
    assert states.is_new
