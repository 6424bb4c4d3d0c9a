# SPDX-License-Identifier: Apache-2.0
"""The order in which a pipeline stage runs its micro-batches, and how many of them are in flight at most.

Pure: knows Megatron's schedules by what they do (without pipelining, 1F1B and interleaved 1F1B, of
`megatron.core.pipeline_parallel.schedules`), and calls none of them.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Pass", "StageSchedule"]

# Interleaved 1F1B has its first backward within the second group, and repeats itself from there.
_GROUPS_THAT_MATTER = 2


class Pass(NamedTuple):
    """A forward or a backward of a micro-batch through one model chunk of a stage.

    Args:
        is_forward: else its backward.
        chunk: of the stage's model chunks, counted from 0.
        micro_batch: of those of the step, counted from 0.
    """

    is_forward: bool
    chunk: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """What Megatron's schedules make of one stage of a pipeline.

    Args:
        stages: of the pipeline (`pipeline_model_parallel_size`).
        stage: this one, counted from 0.
        chunks: of each stage (`virtual_pipeline_model_parallel_size`).
        group_size: micro-batches that run through a chunk before the next chunk's turn
            (`microbatch_group_size_per_vp_stage`); None for as many as there are stages.
        has_expert_overlap: a forward runs beside the backward of another micro-batch
            (`overlap_moe_expert_parallel_comm`).

    Raises:
        ValueError: if no schedule of Megatron's takes these.
    """

    stages: int = 1
    stage: int = 0
    chunks: int = 1
    group_size: int | None = None
    has_expert_overlap: bool = False

    def __post_init__(self) -> None:
        if self.stages < 1 or self.chunks < 1:
            raise ValueError(f"expected at least one stage and chunk, got {self.stages} and {self.chunks}")
        if not 0 <= self.stage < self.stages:
            raise ValueError(f"expected a stage from 0 to {self.stages - 1}, got {self.stage}")
        if self.chunks > 1 and self.stages == 1:
            raise ValueError(f"expected one chunk without a pipeline, got {self.chunks}")
        if self.has_expert_overlap and self.stages > 1 and self.chunks == 1:
            raise ValueError("expected several chunks a stage for expert overlap in a pipeline, got 1")
        if self.group_size is not None and self.group_size < self.stages:
            raise ValueError(
                f"expected groups of at least {self.stages} micro-batches, one a stage, got {self.group_size}"
            )

    @property
    def _group(self) -> int:
        return self.group_size or self.stages

    def is_legal(self, count: int) -> bool:
        """Whether a step may have so many micro-batches."""
        if self.chunks == 1:
            return count >= 1
        rest = count % self._group
        return count >= self._group and (rest == 0 or rest >= self.stages)

    @property
    def warm_up(self) -> int:
        """Forwards before the first backward, if the step has as many."""
        behind, extra = self.stages - self.stage - 1, int(self.has_expert_overlap)
        if self.chunks == 1:
            return behind + extra
        return 2 * behind + (self.chunks - 1) * self._group + extra

    def passes(self, count: int, *, forward_only: bool = False) -> Iterator[Pass]:
        """The order in which this stage runs a step.

        Args:
            count: micro-batches of the step.
            forward_only: as in an evaluation.

        Raises:
            ValueError: if the schedule refuses such a count.
        """
        if not self.is_legal(count):
            raise ValueError(f"expected a number of micro-batches that {self} takes, got {count}")
        turns = [*self._turns(count)]
        if forward_only:
            yield from (Pass(True, *turn) for turn in turns)
            return
        backwards = (Pass(False, self.chunks - 1 - chunk, micro_batch) for chunk, micro_batch in turns)
        for index, turn in enumerate(turns):
            yield Pass(True, *turn)
            if index >= self.warm_up:
                yield next(backwards)
        yield from backwards

    def _turns(self, count: int) -> Iterator[tuple[int, int]]:
        """Chunks, and the micro-batches that run through them, in the order of forwards."""
        for start in range(0, count, self._group):
            for chunk in range(self.chunks):
                for micro_batch in range(start, min(start + self._group, count)):
                    yield chunk, micro_batch

    def in_flight(self, count: int) -> tuple[int, ...]:
        """The most micro-batches of each chunk between their forward and the end of their backward.

        Args:
            count: micro-batches of the step.
        """
        now, most = [0] * self.chunks, [0] * self.chunks
        for is_forward, chunk, _ in self.passes(count):
            now[chunk] += 1 if is_forward else -1
            most[chunk] = max(most[chunk], now[chunk])
        return tuple(most)

    @functools.cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """The most micro-batches of each chunk in flight at once, whatever legal number a step has."""
        if self.chunks == 1:
            return (self.warm_up + 1,)
        counts = filter(self.is_legal, range(1, _GROUPS_THAT_MATTER * self._group + 1))
        return tuple(map(max, zip(*map(self.in_flight, counts), strict=True)))
