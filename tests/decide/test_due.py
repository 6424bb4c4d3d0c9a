# SPDX-License-Identifier: Apache-2.0
"""What is due to be captured, which states there are, which capacities: all follows from the steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagraph._C import DueVariants, States
from megagraph.decide.dispatch import Capacity, PackForm, PackShape, VariantKey, capacities_for, needs_of
from megagraph.decide.reasons import EagerReason

TRAINING = VariantKey(None, PackForm(False, False, None), grad=True)
OTHER = TRAINING.replace(form=PackForm(True, False, None))
EVALUATION = TRAINING.replace(grad=False)


def in_state(state: int, kind: VariantKey = TRAINING) -> VariantKey:
    return kind.replace(state=state)


@pytest.fixture
def variants() -> DueVariants:
    """Training takes two steps, everything else one."""
    return DueVariants(warm_up_steps=2)


def run_step(variants: DueVariants, *of_step: VariantKey) -> None:
    for kind in of_step:
        variants.note(kind)
    variants.end_step()


def test_a_kind_is_due_after_as_many_steps_as_it_needs_however_often_it_occurs_in_them(
    variants: DueVariants,
) -> None:
    variants.note(EVALUATION)
    assert not variants.due, "the step has not ended"
    run_step(variants, *[TRAINING] * 3)
    assert variants.due == {EVALUATION}
    run_step(variants, TRAINING, TRAINING)
    assert variants.due == variants.warmed_up == {TRAINING, EVALUATION}


def test_what_was_captured_is_not_due_again(variants: DueVariants) -> None:
    run_step(variants, EVALUATION)
    variants.mark_captured({EVALUATION})
    run_step(variants, EVALUATION)
    assert not variants.due


def test_what_others_had_captured_before_it_was_met_here_is_not_due(variants: DueVariants) -> None:
    variants.mark_captured({EVALUATION, TRAINING})
    run_step(variants, EVALUATION, TRAINING)
    assert not variants.due and variants.warmed_up == {EVALUATION, TRAINING}


def test_once_training_has_graphs_further_kinds_take_one_step(variants: DueVariants) -> None:
    variants.mark_captured({TRAINING})
    run_step(variants, OTHER)
    assert variants.due == {OTHER}


def test_without_their_graphs_all_warm_kinds_are_due_again(variants: DueVariants) -> None:
    run_step(variants, EVALUATION, in_state(1, EVALUATION))
    variants.mark_captured({EVALUATION})
    variants.forget_graphs()
    assert variants.due == {EVALUATION, in_state(1, EVALUATION)} and not variants.captured


def test_steps_of_a_family_warm_all_of_its_kinds_up(variants: DueVariants) -> None:
    run_step(variants, in_state(1))
    assert not variants.due
    run_step(variants, in_state(2))
    assert variants.due == {in_state(1), in_state(2)}
    run_step(variants, in_state(3))
    assert variants.due == {in_state(1), in_state(2), in_state(3)}


def test_kinds_are_due_in_their_own_state(variants: DueVariants) -> None:
    run_step(variants, in_state(1, EVALUATION), in_state(2, EVALUATION))
    assert variants.due_in(1, grad_enabled=True) == {in_state(1, EVALUATION)}
    assert not variants.due_in(3, grad_enabled=True)
    for _ in range(2):  # also training that meets one again before it is warm, or is warm at once
        run_step(variants, in_state(1))
    assert not variants.due_in(9, grad_enabled=True)
    run_step(once := DueVariants(warm_up_steps=1), in_state(1))
    assert not once.due_in(9, grad_enabled=True)


def test_training_that_never_meets_a_state_twice_is_due_in_that_of_now(variants: DueVariants) -> None:
    """Calls of some layer may change it in each step, which a capture finds out."""
    for state in range(3):
        run_step(variants, in_state(state))
        assert variants.due_in(9, grad_enabled=True) == ({in_state(9)} if state > 0 else set())
    run_step(variants, in_state(0))
    assert not variants.due_in(9, grad_enabled=True)


def test_before_an_evaluation_training_is_due_in_no_other_state(variants: DueVariants) -> None:
    for state in range(3):
        run_step(variants, in_state(state))
    assert not variants.due_in(9, grad_enabled=False)
    assert variants.due_in(2, grad_enabled=False) == {in_state(2)}


def test_training_with_graphs_waits_for_its_own_states(variants: DueVariants) -> None:
    for state in range(3):
        run_step(variants, in_state(state))
    variants.mark_captured({in_state(9)})
    assert not variants.due_in(9, grad_enabled=True)


def test_forgotten_kinds_have_to_occur_again(variants: DueVariants) -> None:
    run_step(variants, in_state(1, EVALUATION), in_state(2, EVALUATION))
    variants.mark_captured({in_state(1, EVALUATION)})
    variants.forget_states({1})
    assert not variants.captured and variants.due == variants.warmed_up == {in_state(2, EVALUATION)}
    run_step(variants, in_state(1, EVALUATION))
    assert variants.due == {in_state(1, EVALUATION), in_state(2, EVALUATION)}


def test_graphs_that_record_gradients_go_and_the_others_stay(variants: DueVariants) -> None:
    run_step(variants, TRAINING, EVALUATION)
    run_step(variants, TRAINING)
    variants.mark_captured({TRAINING, EVALUATION})
    variants.forget_graphs(only_training=True)
    assert variants.due == {TRAINING} and variants.captured == {EVALUATION}


def test_a_kind_that_is_passed_over_in_three_of_its_own_steps_is_named_once(variants: DueVariants) -> None:
    run_step(variants, EVALUATION)
    named = []
    for kind, passes_over in (
        *((kind, True) for kind in (OTHER, *[EVALUATION] * 2, OTHER)),
        *[(EVALUATION, False)] * 4,
        *[(EVALUATION, True)] * 2,
    ):
        if passes_over:
            variants.due_in(1, grad_enabled=True)
        variants.note(kind)
        named.append(variants.end_step())
    assert named == [set()] * 8 + [{EVALUATION}, set()]


def test_kinds_and_families_are_keys_without_some_values() -> None:
    key = in_state(3).replace(capacity=Capacity(tokens=8, num_seqs=2, max_seqlen=8))
    assert key.kind == in_state(3) and key.family == TRAINING
    assert len({key, key.replace(), key.kind, key.family}) == 3
    assert repr(key.kind) == (
        "VariantKey(capacity=None, form=PackForm(has_padded=False, is_aliased=False, pad_between_seqs=None, "
        "has_seq_idx=False), grad=True, state=3, has_mask=False, cp_size=1, "
        "by_token=False)"
    )


# -- capacities that are learned would have held every pack of the warm-up ---------------------------


shapes = st.builds(
    PackShape,
    tokens=st.integers(1, 4096),
    num_seqs=st.integers(2, 300),
    max_seqlen=st.integers(1, 4096),
    cp_size=st.just(1),
).filter(lambda shape: shape.max_seqlen <= shape.tokens)


@given(st.lists(shapes, min_size=1, max_size=20), st.sampled_from([0, 1]))
def test_every_observed_pack_fits(observed: list[PackShape], extra_seqs: int) -> None:
    learned = capacities_for(needs_of(observed, extra_seqs), extra_seqs)
    assert 1 <= len(learned) <= 2
    assert all(any(shape.exceeds(held) is None for held in learned) for shape in observed)


def test_most_packs_get_a_capacity_of_their_own() -> None:
    for extra in (0, 1):  # documents of the tail
        observed = [PackShape(100, count + extra, 40) for count in (2, 4, 4, 4, 30)]
        learned = capacities_for(needs_of(observed, extra), extra)
        assert [capacity.num_seqs - extra for capacity in learned] == [4, 32]


@given(st.lists(st.lists(shapes, max_size=20), min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_the_largest_of_each_number_holds_what_any_rank_has_observed(
    observed: list[list[PackShape]], extra_seqs: int
) -> None:
    """Also where one has observed nothing."""
    packs = [shape for of_rank in observed for shape in of_rank]
    needs = [needs_of(of_rank, extra_seqs) for of_rank in observed]
    agreed = [*map(max, zip(*needs, strict=True))]
    learned = capacities_for(agreed, extra_seqs) if packs else ()
    assert all(any(shape.exceeds(held) is None for held in learned) for shape in packs)


def test_nothing_is_learned_where_nobody_has_met_a_pack() -> None:
    with pytest.raises(ValueError, match="there were none"):
        capacities_for(needs_of([]))


# -- states ------------------------------------------------------------------------------------------


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
    assert states.oldest_first() == [1, 0, 2]
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
    assert meet(10, 20) == ([0, 0], [True, True])  # of the calls since then


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
