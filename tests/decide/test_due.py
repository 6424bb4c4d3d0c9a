# SPDX-License-Identifier: Apache-2.0
"""What is due to be captured follows from the steps alone."""

import pytest

from megagraph.decide.due import DueKinds


@pytest.fixture
def kinds() -> DueKinds[str]:
    """Training takes two steps, everything else one. A family is what stands before a colon."""
    return DueKinds(lambda kind: kind.partition(":")[0], lambda kind: 2 if kind.startswith("training") else 1)


def run_step(kinds: DueKinds[str], *of_step: str) -> None:
    for kind in of_step:
        kinds.note(kind)
    kinds.end_step()


def test_a_kind_is_due_after_as_many_steps_as_it_needs(kinds: DueKinds[str]) -> None:
    run_step(kinds, "training", "evaluation")
    assert kinds.due == {"evaluation"}
    run_step(kinds, "training", "training")
    assert kinds.due == kinds.warmed_up == {"training", "evaluation"}


def test_several_micro_batches_of_a_step_count_once(kinds: DueKinds[str]) -> None:
    run_step(kinds, "training", "training", "training")
    assert not kinds.due


def test_a_step_that_has_not_ended_counts_nothing(kinds: DueKinds[str]) -> None:
    kinds.note("evaluation")
    assert not kinds.due


def test_what_was_captured_is_not_due_again(kinds: DueKinds[str]) -> None:
    run_step(kinds, "evaluation")
    kinds.mark_captured({"evaluation"})
    run_step(kinds, "evaluation")
    assert not kinds.due


def test_what_others_had_captured_before_it_was_met_here_is_not_due(kinds: DueKinds[str]) -> None:
    kinds.mark_captured({"evaluation", "training"})
    run_step(kinds, "evaluation", "training")
    run_step(kinds, "evaluation", "training")
    assert not kinds.due and kinds.warmed_up == {"evaluation", "training"}


def test_without_their_graphs_all_warm_kinds_are_due_again(kinds: DueKinds[str]) -> None:
    run_step(kinds, "evaluation", "training")
    kinds.mark_captured({"evaluation"})
    kinds.forget_graphs()
    assert kinds.due == {"evaluation"}


def test_steps_of_a_family_warm_all_of_its_kinds_up(kinds: DueKinds[str]) -> None:
    run_step(kinds, "training:on")
    assert not kinds.due
    run_step(kinds, "training:off")
    assert kinds.due == {"training:on", "training:off"}
    run_step(kinds, "training:merged")
    assert kinds.due == {"training:on", "training:off", "training:merged"}


def test_a_family_whose_kinds_never_occur_twice_never_recurs(kinds: DueKinds[str]) -> None:
    for step in range(3):
        run_step(kinds, f"training:{step}")
        assert kinds.never_recurs("training:0") == (step > 0)
    run_step(kinds, "training:0")
    assert not kinds.never_recurs("training:0")


def test_captured_kinds_are_found_by_their_family(kinds: DueKinds[str]) -> None:
    run_step(kinds, "a:1", "a:2", "b:1")
    kinds.mark_captured({"a:1", "b:1"})
    assert kinds.captured_of_family("a:3") == ["a:1"]


def test_forgotten_kinds_have_to_occur_again(kinds: DueKinds[str]) -> None:
    run_step(kinds, "a:1", "a:2")
    kinds.mark_captured({"a:1"})
    kinds.forget(lambda kind: kind == "a:1")
    assert not kinds.captured and kinds.due == {"a:2"} and kinds.warmed_up == {"a:2"}
    run_step(kinds, "a:1")
    assert kinds.due == {"a:1", "a:2"}


def test_graphs_of_some_kinds_go_and_the_others_stay(kinds: DueKinds[str]) -> None:
    run_step(kinds, "a", "b", "cold")
    run_step(kinds, "training")
    kinds.mark_captured({"a", "b"})
    kinds.forget_graphs(lambda kind: kind in ("b", "training"))
    assert kinds.due == {"b", "cold"}


def test_a_kind_that_is_passed_over_in_three_of_its_own_steps_is_named_once(kinds: DueKinds[str]) -> None:
    run_step(kinds, "evaluation")
    named = []
    for of_step in (["other"], ["evaluation"], ["evaluation"], ["other"], ["evaluation"], ["evaluation"]):
        kinds.pass_over({"evaluation"})
        for kind in of_step:
            kinds.note(kind)
        named.append(kinds.end_step())
    assert named == [set(), set(), set(), set(), {"evaluation"}, set()]


def test_a_step_that_passed_nothing_over_names_nobody(kinds: DueKinds[str]) -> None:
    kinds.pass_over({"evaluation"})
    kinds.end_step()
    for _ in range(4):
        kinds.note("evaluation")
        assert not kinds.end_step()
