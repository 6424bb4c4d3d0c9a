# SPDX-License-Identifier: Apache-2.0
"""What is due to be captured; states, capacities and what is in flight: all follows from the steps."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, combinations, islice, product
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megagraph import _C
from megagraph._C import Capacity, PackForm, PackShape, StageSchedule, VariantKey, best_capacities
from megagraph.reasons import EagerReason

TRAINING = VariantKey(None, PackForm(False, False, None), grad=True)
OTHER = TRAINING.replace(form=PackForm(True, False, None))
EVALUATION = TRAINING.replace(grad=False)


def kinds(words: Sequence[str]) -> set[VariantKey]:
    """`T` training, `O` another form of it, `E` an evaluation; behind that the number of its state."""
    named = {"T": TRAINING, "O": OTHER, "E": EVALUATION}
    return {named[word[0]].replace(state=int(word[1:])) if word[1:] else named[word] for word in words}


# Training takes two steps, everything else one. What has happened; what then is `due` (in a state `before`
# training, or an `evaluation`), is `warm`, and has `graphs`.
SCRIPTS = {
    "a kind after the steps that it needs": "note E; due; step T T T; due E; step T T; due T E; warm T E",
    "not again what was captured": "step E; captured E; step E; due",
    "not what others had captured before it was met here": "captured E T; step E T; due; warm E T",
    "further kinds after one step, once training has graphs": "captured T; step O; due O",
    "all warm kinds again, without their graphs": "step E E1 E; captured E; forget graphs; due E E1; graphs",
    "all kinds of a family": "step T1 T2; due; step T2 T3; due T2 T3; step T1; due T1 T2 T3",
    "what only the first micro-batch was in once it comes again": (
        "step E0 E; due E; step T0 T1; step T1; due E T1; step T2; due E T1 T2; step T0; due E T0 T1 T2"
    ),
    # In those of no number, which each may be another one, for as long as there are some.
    "training in the state of now if calls change it": (
        "step T0 T-1; step T1 T-1; before 9 T9; due T-1 T1; step T2; due T1 T2"
    ),
    # Also training that meets one again before it is warm, or is warm at once.
    "kinds in their own state": "step E1 E2 E1; before 1 E1; before 3; step T1; step T1; before 9",
    "kinds in their own state, warm at once": "steps 1; step T1; before 9",
    # Calls of some layer may change it in each step, which a capture finds out.
    "training that never meets a state twice in that of now": (
        "step T0; before 9; step T1; before 9 T9; step T2; before 9 T9; step T0; before 9"
    ),
    "no training in other states for evaluations": "step T0; step T1; step T2; evaluation 9; evaluation 2 T2",
    "training with graphs in its own states": "step T0; step T1; step T2; captured T9; before 9",
    "what was forgotten": "step E1 E2 E1; captured E1; forget 1; graphs; due E2; warm E2; step E1; due E1 E2",
    "those that record gradients, whose graphs go, and not the others": (
        "step T E; step T; captured T E; forget training; due T; graphs E"
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_due(name: str) -> None:
    variants = _C.DueVariants(warm_up_steps=2)
    for verb, *words in map(str.split, SCRIPTS[name].split(";")):
        if verb == "steps":
            variants = _C.DueVariants(warm_up_steps=int(words[0]))
        elif verb in ("note", "step"):
            for word in words:
                variants.note(*kinds([word]))
            if verb == "step":
                variants.end_step()
        elif verb == "captured":
            variants.mark_captured(kinds(words))
        elif verb == "forget" and words[0].isdigit():
            variants.forget_states({int(words[0])})
        elif verb == "forget":
            variants.forget_graphs(only_training=words == ["training"])
        else:
            found = {"due": variants.due, "warm": variants.warmed_up, "graphs": variants.captured}.get(verb)
            if found is None:
                found = variants.due_in(int(words.pop(0)), grad_enabled=verb == "before")
            assert found == kinds(words), f"{verb} in {SCRIPTS[name]}"


def test_a_kind_that_is_passed_over_in_three_of_its_own_steps_is_named_once() -> None:
    variants, named = _C.DueVariants(warm_up_steps=2), []
    variants.note(EVALUATION)
    variants.end_step()
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
    key = TRAINING.replace(state=3, capacity=Capacity(tokens=8, num_seqs=2, max_seqlen=8))
    assert key.kind == TRAINING.replace(state=3) and key.family == TRAINING
    assert len({key, key.replace(), key.kind, key.family}) == 3
    assert repr(key.kind) == (
        "VariantKey(capacity=None, form=PackForm(has_padded=False, is_aliased=False, pad_between_seqs=None, "
        "has_seq_idx=False), grad=True, state=3, has_mask=False, cp_size=1, by_token=False)"
    )


# -- capacities that are learned would have held every pack of the warm-up ---------------------------

shapes = st.builds(PackShape, st.integers(1, 4096), st.integers(2, 300), st.integers(1, 4096))


def test_most_packs_get_a_capacity_of_their_own() -> None:
    for extra in (0, 1):  # documents of the tail
        observed = {PackShape(100, count + extra, 40): times for count, times in ((2, 1), (4, 3), (30, 1))}
        learned = _C.capacities_for(_C.needs_of(observed, extra), extra)
        assert [(it.tokens, it.num_seqs - extra) for it in learned] == [(100, 4), (100, 64)]


def test_packs_that_vary_get_headroom_and_equal_ones_none() -> None:
    """Three steps of warm-up rarely meet the largest pack of a run: the next larger one ran eager."""
    for counts, tokens, expected in (([8] * 3, [500] * 3, (500, 8)), ((6, 7, 8), (500, 480, 510), (640, 16))):
        observed = Counter(PackShape(*shape, 40) for shape in zip(tokens, counts, strict=True))
        learned = _C.capacities_for(_C.needs_of(observed))
        assert (learned[-1].tokens, learned[-1].num_seqs) == expected


@given(st.lists(st.lists(shapes, max_size=20), min_size=1, max_size=4), st.sampled_from([0, 1]))
@example([[]], 0)
def test_the_largest_numbers_hold_what_any_rank_met(observed: list[list[PackShape]], extra_seqs: int) -> None:
    """Also where one has observed nothing. If all of them have, there is nothing to learn."""
    packs = [shape for of_rank in observed for shape in of_rank]
    needs = [_C.needs_of(Counter(of_rank), extra_seqs) for of_rank in observed]
    agreed = [*map(max, zip(*needs, strict=True))]
    if not packs:
        with pytest.raises(ValueError, match="there were none"):
            _C.capacities_for(agreed, extra_seqs)
        return
    learned = _C.capacities_for(agreed, extra_seqs)
    assert 1 <= len(learned) <= 2
    assert all(any(shape.exceeds(held) is None for held in learned) for shape in packs)


# -- the capacities that pad packs least, against every choice that there is ----------------------------

Packs = Mapping[PackShape, int]
# Few values, so that packs share tokens and documents.
few_shapes = st.builds(PackShape, st.integers(1, 7), st.integers(0, 4), st.integers(1, 7))
packs_seen = st.dictionaries(few_shapes, st.integers(1, 5), min_size=1, max_size=7)
rooms = st.tuples(st.integers(1, 9), st.integers(1, 5))


def padded(packs: Packs, capacities: Sequence[Capacity]) -> tuple[int, int] | None:
    """Tokens and documents; None if a pack fits none."""
    tokens = documents = 0
    for shape, count in packs.items():
        fitting = [it for it in capacities if shape.exceeds(it) is None]
        if not fitting:
            return None
        chosen = min(fitting)
        tokens += count * (chosen.tokens - shape.tokens)
        documents += count * (chosen.num_seqs - max(shape.num_seqs, 1))
    return tokens, documents


def every_choice(packs: Packs, room: tuple[int, int], multiple: int, most: int) -> Iterator[list[Capacity]]:
    """That has room for larger packs."""
    tokens = {-(-number // multiple) * multiple for number in (*(it.tokens for it in packs), room[0])}
    documents = {max(it.num_seqs, 1) for it in packs} | {room[1]}
    sizes = product(tokens, documents)
    all_of_them = sorted(Capacity(tokens=rows, num_seqs=it, max_seqlen=rows) for rows, it in sizes)
    for size in range(1, most + 1):
        for some in combinations(all_of_them, size):
            if any(it.tokens == max(tokens) and it.num_seqs >= room[1] for it in some):
                yield [*some]


def finds_all(packs: Packs, capacities: Sequence[Capacity]) -> bool:
    """Whether each pack fits the one of most documents, of each number of tokens that is enough for it."""
    most = {it.tokens: it.num_seqs for it in sorted(capacities)}
    pairs = product(packs, most.items())
    return all(shape.num_seqs <= count for shape, (tokens, count) in pairs if shape.tokens <= tokens)


@settings(max_examples=60, deadline=None)
@given(packs=packs_seen, room=rooms, multiple=st.sampled_from([1, 2, 3]))
def test_no_other_choice_pads_fewer_tokens_nor_as_many_with_fewer_documents(
    packs: dict[PackShape, int], room: tuple[int, int], multiple: int
) -> None:
    # In pack_reader.cpp no document is longer than its pack.
    packs = {it.replace(max_seqlen=min(it.max_seqlen, it.tokens)): count for it, count in packs.items()}
    others = [(it, cost) for it in every_choice(packs, room, multiple, 3) if (cost := padded(packs, it))]
    choices = best_capacities(packs, room=room, multiple=multiple, captures=3)
    for most, (capacities, tokens) in enumerate(choices, start=1):
        cost = padded(packs, capacities)
        assert cost is not None and cost[0] == tokens
        assert 1 <= len(capacities) <= most and capacities == sorted(capacities)
        assert all(it.tokens % multiple == 0 and it.max_seqlen == it.tokens for it in capacities)
        assert capacities[-1].tokens >= room[0] and capacities[-1].num_seqs >= room[1]
        assert finds_all(packs, capacities)
        as_large = [(it, other) for it, other in others if len(it) <= most]
        assert tokens == min(other[0] for _it, other in as_large)
        assert cost == min(other for it, other in as_large if finds_all(packs, it))


def test_many_packs_take_no_longer_than_somebody_waits() -> None:
    packs = {PackShape(1 + it * 37 % 30_011, 1 + it % 50, 1): 1 + it % 3 for it in range(4000)}
    choices = best_capacities(packs, room=(32_768, 64), multiple=1, captures=4)
    paddings = [padded for _capacities, padded in choices]
    assert paddings == sorted(paddings, reverse=True) and len({*paddings}) == 4


def test_empty_packs_get_no_capacity_of_no_tokens() -> None:
    """Bug: they got one, which took a capture."""
    packs = {PackShape(0, 0, 1): 3, PackShape(64, 4, 64): 5}
    choices = best_capacities(packs, room=(64, 4), multiple=1, captures=3)
    assert all(it.tokens > 0 for capacities, _padded in choices for it in capacities)


def test_what_makes_no_sense_is_refused() -> None:
    one = PackShape(4, 1, 4)
    for packs, multiple, captures, message in (
        ({}, 1, 1, "and there were none"),
        ({one: 0}, 1, 1, "expected counts of at least 1, got 0"),
        *(({one: 1}, *counts, "at least 1, got") for counts in ((0, 1), (1, 0))),
    ):
        with pytest.raises(ValueError, match=message):
            best_capacities(packs, room=(1, 1), multiple=multiple, captures=captures)


# -- states ------------------------------------------------------------------------------------------


def begin(states: _C.States, *fingerprints: int, settings: int = 1) -> bool:
    """Begins a step in each of these. Returns whether ranks agree on the last one."""
    return [states.agree(states.local_state(0, it, settings)) for it in fingerprints][-1]


def test_numbers_come_in_the_order_in_which_states_are_met() -> None:
    states = _C.States(1)
    for name, under, number, is_new in ((7, 1, 0, True), (8, 1, 1, True), (7, 1, 0, False), (7, 2, 2, True)):
        assert begin(states, name, settings=under)
        assert (states.current, states.is_new) == (number, is_new)
    assert states.make_room({0, 1}, most=2) == {1}
    assert states.of_call(8) == 3  # under the settings of now
    assert states.under(1) == 1
    assert states.eager_reason(0, [2]) is EagerReason.NUMERICS_CHANGED
    assert states.eager_reason(0, [1]) is EagerReason.STATE_CHANGED
    assert states.make_room({0, 1}, most=2) == {0}  # the other one was asked for


def test_ranks_have_one_number_for_what_they_are_in_together() -> None:
    ranks = [_C.States(2), _C.States(2)]

    def meet(*fingerprints: int) -> tuple[list[int], list[bool]]:
        said = [ranks[place].local_state(place, value, 1) for place, value in enumerate(fingerprints)]
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
    states = _C.States(1)
    gone: set[int] = set()
    for fingerprint in range(200):
        begin(states, fingerprint)
        if states.has_many():
            gone |= states.forget_oldest(keep={0})
    assert gone == set(range(1, 137))
    assert begin(states, 1) and states.is_new
    assert begin(states, 0) and not states.is_new and states.current == 0


def test_the_state_of_now_is_kept_where_all_others_have_graphs() -> None:
    """It is the oldest one without graphs, and the step that begins is in it."""
    states = _C.States(1)
    begin(states, *range(65))
    assert states.has_many() and states.forget_oldest(keep=set(range(64))) == set()
    states.rename(100)
    assert begin(states, 100) and not states.is_new and states.current == 64


def test_a_state_has_no_name_of_before_other_modules_counted() -> None:
    """Bug: a layer's own forward that came back, once the layer had graphs again, was taken for none."""
    states = _C.States(1)
    begin(states, 7)
    states.rename(8)
    assert begin(states, 8) and states.current == 0 and states.of_call(7) == 1
    assert begin(states, 7) and states.current == 1


@pytest.mark.parametrize(("size", "run_alike"), [(1, True), (2, True), (2, False)])
def test_a_state_that_calls_alone_are_in_is_not_the_oldest(size: int, run_alike: bool) -> None:
    """But ranks of other packs call in another order, and have to forget the same ones."""
    states = _C.States(size, run_alike=run_alike)
    begin(states, 7, 8, 9)
    assert states.of_call(7) == 0
    assert states.make_room({0, 1, 2}, most=2) == ({1} if run_alike else {0})


def test_states_that_are_forgotten_are_new_when_they_come_back() -> None:
    """Each rank forgets its own names of them, too, or what it remembers would grow for ever."""
    states = _C.States(1)
    for fingerprint in range(100):
        begin(states, fingerprint)
        states.forget_oldest(keep=set())
    first = states.local_state(0, 0, 1)
    assert first[2] == 101  # a number of its own again
    states.agree(first)
    assert states.is_new


def captures(states: _C.States, captured: set[int], fingerprint: int) -> bool:
    """Whether a step in this state begins with a capture; two states may have graphs."""
    begin(states, fingerprint)
    if not states.ask_for_place(captured, most=2):
        return False
    is_new = states.current not in captured
    captured.difference_update(states.make_room(captured, most=2))
    captured.add(states.current)
    return is_new


def test_states_that_never_come_back_soon_have_to_last_to_get_graphs() -> None:
    """Bug: a value that was new in every second step cost a capture each time, without end."""
    in_state = partial(captures, _C.States(1), set[int]())
    lasting = [[in_state(fingerprint), in_state(fingerprint)] for fingerprint in range(30)]
    assert lasting == 6 * [[True, False]] + 4 * [[False, True]] + 20 * [[False, False]]
    assert [in_state(30) for _ in range(5)] == [False] * 3 + [True, False]


def test_states_that_alternate_keep_their_graphs_and_one_that_stays_gets_some() -> None:
    """Bug: the state of all later steps had none for ever, once its graphs had gone twice for others'."""
    states, captured = _C.States(1), set[int]()
    in_state = partial(captures, states, captured)
    assert [in_state(it) for it in 2 * (7, 8, 9)] == 6 * [True]
    assert not any(in_state(it) for it in 8 * (7, 8, 9))  # each one's have gone twice, or stay
    for steps in (4, 4, 4, 8):
        lost = next(it for it in (7, 8, 9) if begin(states, it) and states.current not in captured)
        assert [in_state(lost) for _ in range(steps + 1)] == (steps - 1) * [False] + [True, False]


# -- stages run micro-batches in Megatron's order, and what is in flight in it is known -------------------

Pass = tuple[bool, int, int]  # whether it is a forward, chunk, micro-batch


def order_of_megatron(schedule: StageSchedule, count: int, *, forward_only: bool = False) -> list[Pass]:
    """The order that Megatron's own functions stand for, put together as its schedules do."""
    from megatron.core.pipeline_parallel import schedules

    group = schedule.group_size or schedule.stages
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: schedule.stages, rank=lambda: schedule.stage),
        virtual_pipeline_model_parallel_size=schedule.chunks if schedule.chunks > 1 else None,
    )
    total, _, warm_up, rest = schedules.get_pp_rank_microbatches(
        count, schedule.chunks, group, forward_only, schedule.has_expert_overlap, communicator
    )
    table = schedules.get_schedule_table(count, schedule.chunks, group)
    forwards = iter([(True, chunk, micro_batch) for micro_batch, chunk in table])
    backwards = iter([(False, schedule.chunks - 1 - chunk, micro_batch) for micro_batch, chunk in table])
    order = [*islice(forwards, warm_up)]
    for _ in range(rest):
        order += [next(forwards), next(backwards)]
    assert next(forwards, None) is None and len(order) == warm_up + 2 * rest and warm_up + rest == total
    return order if forward_only else [*order, *backwards]


def schedules() -> Iterator[StageSchedule]:
    """Every stage of pipelines, with some sizes of groups of micro-batches."""
    for stages in range(1, 9):
        for stage in range(stages):
            yield StageSchedule(stages=stages, stage=stage)
            several = product(range(2, 5), (stages, stages + 1, 2 * stages + 1), (False, True))
            for chunks, group_size, overlaps in several if stages > 1 else ():
                how = {"chunks": chunks, "group_size": group_size, "has_expert_overlap": overlaps}
                yield StageSchedule(stages=stages, stage=stage, **how)


@pytest.mark.megatron
def test_order_and_figures_are_those_of_megatron() -> None:
    for schedule in schedules():
        group, most = schedule.group_size or schedule.stages, [0] * schedule.chunks
        # Every legal rest of a group, and the most that are in flight.
        counts = [*range(1, group + schedule.stages), *range(2 * group, 3 * group + 1), 5 * group]
        for count in filter(schedule.is_legal, counts):
            order = order_of_megatron(schedule, count)
            assert schedule.passes(count) == order
            for chunk in range(schedule.chunks):
                passes = (1 if is_forward else -1 for is_forward, of, _ in order if of == chunk)
                in_flight = [*accumulate(passes)]
                assert min(in_flight) >= 0
                most[chunk] = max(most[chunk], *in_flight)
            forwards = schedule.passes(count, forward_only=True)
            assert forwards == order_of_megatron(schedule, count, forward_only=True)
            assert all(is_forward for is_forward, _, _ in forwards) and 2 * len(forwards) == len(order)
        assert most == schedule.most_in_flight, schedule


def test_without_a_pipeline_one_is_in_flight_and_with_expert_overlap_two() -> None:
    assert StageSchedule().most_in_flight == [1]
    schedule = StageSchedule(has_expert_overlap=True)
    assert schedule.most_in_flight == [2] == schedule.in_flight(7) and schedule.in_flight(1) == [1]


def test_counts_that_megatron_takes() -> None:
    """As its schedule raises: fewer than a group, and a rest with fewer than there are stages."""
    for group, legal in ((None, [2, 4, 6, 8]), (2, [2, 4, 6, 8]), (3, [3, 5, 6, 8]), (4, [4, 6, 7, 8])):
        schedule = StageSchedule(stages=2, chunks=2, group_size=group)
        assert [*filter(schedule.is_legal, range(9))] == legal
        with pytest.raises(ValueError, match=r"expected a number of micro-batches that .* takes, got 1"):
            schedule.passes(1)
    assert not StageSchedule(stages=2).is_legal(0) and StageSchedule(stages=2).is_legal(1)


def test_what_no_schedule_takes() -> None:
    for wrong, message in (
        ({"stages": 0}, "expected at least one stage and chunk, got 0 and 1"),
        ({"stages": 2, "stage": 2}, "expected a stage from 0 to 1, got 2"),
        ({"chunks": 2}, "expected one chunk without a pipeline, got 2"),
        ({"stages": 2, "has_expert_overlap": True}, "expected several chunks a stage"),
        ({"stages": 4, "chunks": 2, "group_size": 3}, "expected groups of at least 4 micro-batches.*got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            StageSchedule(**wrong)
