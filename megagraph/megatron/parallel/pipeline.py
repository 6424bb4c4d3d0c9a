# SPDX-License-Identifier: Apache-2.0
"""A model chunk's place in its pipeline: its name, and how many of its micro-batches are in flight."""

from typing import Any

from torch import nn

from megagraph.decide.in_flight import StageSchedule
from megagraph.megatron.parallel.groups import ranks_of

__all__ = ["hands_on", "place_of", "schedule_of", "slots_of", "speaks_for_stage"]


def schedule_of(model: nn.Module) -> StageSchedule:
    """What Megatron's schedules make of the stage that a model chunk is of.

    Args:
        model: the GPTModel or HybridModel, whose config says how the pipeline is cut.
    """
    config: Any = model.config
    stages: int = config.pipeline_model_parallel_size
    if stages == 1:
        return StageSchedule(has_expert_overlap=config.overlap_moe_expert_parallel_comm)
    group: Any = model.pp_group
    return StageSchedule(
        stages=stages,
        stage=group.rank(),
        chunks=config.virtual_pipeline_model_parallel_size or 1,
        group_size=config.microbatch_group_size_per_vp_stage,
        has_expert_overlap=config.overlap_moe_expert_parallel_comm,
    )


def slots_of(model: nn.Module, asked: int | None) -> int:
    """How many micro-batches of a model chunk have graphs and memory of their own.

    Args:
        model: the chunk.
        asked: `cuda_graph_slots`. In a pipeline no chunk needs more than its schedule has in flight. Without
            one a loop of the host's may have as many in flight as it likes.
    """
    schedule = schedule_of(model)
    needed = schedule.most_in_flight[_chunk(model)]
    if asked is None:
        return needed
    return asked if schedule.stages == 1 else min(asked, needed)


def place_of(model: nn.Module) -> str:
    """Which stage and chunk it is, for people: "stage 1, chunk 0"; empty without a pipeline."""
    schedule = schedule_of(model)
    if schedule.stages == 1:
        return ""
    stage = f"stage {schedule.stage}"
    return stage if schedule.chunks == 1 else f"{stage}, chunk {_chunk(model)}"


def speaks_for_stage(model: Any) -> bool:
    """Whether this rank is in the pipeline of rank 0, and so the one of its stage that writes reports."""
    return 0 in ranks_of(model.pp_group)


def hands_on(model: nn.Module) -> bool:
    """Whether another stage or chunk gets its hidden states, which the schedule keeps or sends meanwhile."""
    return not getattr(model, "post_process", True)


def _chunk(model: Any) -> int:
    return model.vp_stage or 0
