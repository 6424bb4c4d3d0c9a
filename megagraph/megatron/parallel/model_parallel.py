# SPDX-License-Identifier: Apache-2.0
"""Model parallelism: ranks that share rows of hidden states, that share experts, and stages of a pipeline.

Of T rows, rank r of n tensor-parallel ones has those from r*T/n on. Rows are added, or dropped, behind the
last one of the last rank, so that the others have other owners, and rows are handed round.

What a caller hands in between the layers (`decoder_input`) or takes out there (`output_processor`) is shared
out by the pack as it was given, and the layers' rows by the capacity. A stage of a pipeline, whose rows other
stages see, takes packs that fill their capacity.
"""

import weakref
from typing import Any

from torch import Tensor, distributed, nn

from megagraph._C import StageSchedule
from megagraph.megatron.parallel.groups import groups_of_pack
from megagraph.megatron.seams import GPT_FORWARD
from megagraph.modules.experts import linear_map

__all__ = ["TensorRanks", "has_experts", "need_equal_rows", "schedule_of", "slots_of", "splits"]


def splits(given: int, wanted: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """How many of its `given` rows a rank sends to each rank, and gets from each of its `wanted`."""

    def overlap(holder: int, taker: int) -> int:
        first, end = max(holder * given, taker * wanted), min((holder + 1) * given, (taker + 1) * wanted)
        return max(0, end - first)

    return [overlap(rank, peer) for peer in range(size)], [overlap(peer, rank) for peer in range(size)]


class TensorRanks:
    """The tensor-parallel group of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        group = self._group()
        self.size: int = 1 if group is None else distributed.get_world_size(group)
        config: Any = model.config
        # Each rank holds a share of the rows between the layers.
        self.shards_sequence: bool = config.sequence_parallel and self.size > 1
        self.row_shares = self.size if self.shards_sequence else 1
        # Such a model shares out the padding masks that it makes from ids itself.
        self.is_gpt = isinstance(model, GPT_FORWARD.owner())

    def _group(self) -> Any:
        return groups_of_pack(self._model()).get("tp")

    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.size == 1 else distributed.get_rank(self._group())

    def num_tokens(self, hidden_states: Tensor) -> int:
        """Physical tokens of a pack, all ranks together, from the hidden states [T, 1, H] of this one."""
        return hidden_states.size(0) * self.row_shares

    def rows(self, tokens: int) -> int:
        """Rows between layers on one rank, of a pack of `tokens`; `ValueError` if there is no even share."""
        if tokens % self.row_shares:
            raise ValueError(
                f"sequence parallelism shares the rows of a pack among {self.size} ranks: expected "
                f"capacities of a multiple of {self.size} tokens, got {tokens}"
            )
        return tokens // self.row_shares

    def share_anew(self, hidden_states: Tensor, tokens: int) -> Tensor:
        """This rank's rows [T, 1, H] of a pack that is made one of `tokens` physical tokens, at its end.

        Rows that are added are zero; rows that are dropped get a gradient of zero. Hidden states that need a
        gradient need it on every rank of the group, each of which calls this equally often.
        """
        given, wanted, group = hidden_states.size(0), self.rows(tokens), self._group()

        def moved(rows: Tensor, wanted: int) -> Tensor:
            sent, got = splits(rows.size(0), wanted, distributed.get_rank(group), self.size)
            out = rows.new_empty(wanted, *rows.shape[1:])
            out[sum(got) :].zero_()
            mine = rows[: sum(sent)].contiguous()
            distributed.all_to_all_single(out[: sum(got)], mine, got, sent, group=group)
            return out

        return linear_map(hidden_states, lambda rows: moved(rows, wanted), lambda grad: moved(grad, given))


def has_experts(config: Any) -> bool:
    """Whether a model's config asks for experts in some layer."""
    return getattr(config, "num_moe_experts", None) is not None


def need_equal_rows(config: Any) -> bool:
    """Whether a model's experts are spread over ranks from each of which they take as many rows."""
    is_spread = has_experts(config) and config.expert_model_parallel_size > 1
    gathers = config.moe_token_dispatcher_type == "allgather"
    return is_spread and bool(gathers or config.moe_pad_expert_input_to_capacity)


def schedule_of(model: Any) -> StageSchedule:
    """What Megatron's schedules make of the stage that a model chunk is of."""
    config: Any = model.config
    stages: int = config.pipeline_model_parallel_size
    return StageSchedule(
        stages=stages,
        stage=model.pp_group.rank() if stages > 1 else 0,
        chunks=config.virtual_pipeline_model_parallel_size or 1,
        group_size=config.microbatch_group_size_per_vp_stage,
        has_expert_overlap=config.overlap_moe_expert_parallel_comm,
    )


def slots_of(model: Any, asked: int | None) -> int:
    """How many micro-batches of a chunk have graphs and memory of their own; `asked`: `cuda_graph_slots`.

    In a pipeline no chunk needs more than its schedule has in flight. Without one a loop of the host's may
    have as many in flight as it likes.
    """
    schedule = schedule_of(model)
    needed = schedule.most_in_flight[model.vp_stage or 0]
    asked = needed if asked is None else asked
    return asked if schedule.stages == 1 else min(asked, needed)
