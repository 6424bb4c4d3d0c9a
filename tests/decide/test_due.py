# SPDX-License-Identifier: Apache-2.0
"""What is due to be captured follows from the steps alone."""

import pytest

from megagraph._C import DueVariants
from megagraph.decide.dispatch import Capacity, PackForm, VariantKey

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
    for kind in (OTHER, *[EVALUATION] * 2, OTHER, *[EVALUATION] * 2):
        variants.due_in(1, grad_enabled=True)
        variants.note(kind)
        named.append(variants.end_step())
    assert named == [set(), set(), set(), set(), {EVALUATION}, set()]
    for _ in range(4):  # which pass nothing over
        variants.note(EVALUATION)
        assert not variants.end_step()


def test_kinds_and_families_are_keys_without_some_values() -> None:
    key = in_state(3).replace(capacity=Capacity(tokens=8, num_seqs=2, max_seqlen=8))
    assert key.kind == in_state(3) and key.family == TRAINING
    assert len({key, key.replace(), key.kind, key.family}) == 3
    assert repr(key.kind) == (
        "VariantKey(capacity=None, form=PackForm(has_padded=False, is_aliased=False, pad_between_seqs=None, "
        "has_seq_idx=False), grad=True, state=3, has_mask=False, cp_size=1, "
        "by_token=False)"
    )
