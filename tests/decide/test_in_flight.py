# SPDX-License-Identifier: Apache-2.0
"""The order in which stages run micro-batches is Megatron's, and so is what is in flight in it."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from megagraph._C import StageSchedule

MOST_STAGES, MOST_CHUNKS = 8, 4
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
    order = [*itertools.islice(forwards, warm_up)]
    for _ in range(rest):
        order += [next(forwards), next(backwards)]
    assert next(forwards, None) is None and len(order) == warm_up + 2 * rest and warm_up + rest == total
    return order if forward_only else [*order, *backwards]


def schedules() -> Iterator[StageSchedule]:
    """Every stage of pipelines, with some sizes of groups of micro-batches."""
    for stages in range(1, MOST_STAGES + 1):
        for stage in range(stages):
            yield StageSchedule(stages=stages, stage=stage)
            groups = (stages, stages + 1, 2 * stages + 1)
            several = itertools.product(range(2, MOST_CHUNKS + 1), groups, (False, True))
            for chunks, group_size, overlaps in several if stages > 1 else ():
                how = {"chunks": chunks, "group_size": group_size, "has_expert_overlap": overlaps}
                yield StageSchedule(stages=stages, stage=stage, **how)


def most_in(order: list[Pass], chunks: int) -> list[int]:
    now, most = [0] * chunks, [0] * chunks
    for is_forward, chunk, _ in order:
        now[chunk] += 1 if is_forward else -1
        assert now[chunk] >= 0
        most[chunk] = max(most[chunk], now[chunk])
    return most


@pytest.mark.megatron
def test_order_and_figures_are_those_of_megatron() -> None:
    for schedule in schedules():
        group, most = schedule.group_size or schedule.stages, [0] * schedule.chunks
        # Every legal rest of a group, and the most that are in flight.
        counts = [*range(1, group + schedule.stages), *range(2 * group, 3 * group + 1), 5 * group]
        for count in filter(schedule.is_legal, counts):
            order = order_of_megatron(schedule, count)
            assert schedule.passes(count) == order
            most = [*map(max, most, most_in(order, schedule.chunks))]
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
