# SPDX-License-Identifier: Apache-2.0
"""Decides in C++ on the micro-batches of one model, and is told here, between steps, what it has to know.

Its capacities are as configured, or learned from the packs of the warm-up.

Note [Equal rows]
Experts over several ranks may take as many rows from each: with a dispatcher that gathers all rows, or if
they are padded to a capacity. Each rank has packs of its own and asks nobody about them. So the capacities of
such a model have one number of rows, the same on all ranks, and every micro-batch has that many, in eager
too. A pack of too many documents, or of one that is too long, is padded to a capacity of its own, without
graphs (csrc/python/dispatcher.cpp); what cannot be padded has just that many rows, or is an error. Until
capacities are known packs run as given, and need equal rows as with Megatron alone. All ranks learn them at
the same step boundary.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from megagraph import _C
from megagraph._C import Capacity, MicroBatch, VariantKey, capacities_for
from megagraph.bank.capture import MaxOverRanks
from megagraph.config import GraphConfig
from megagraph.log import PATIENCE, log
from megagraph.megatron.graphs.layer_arguments import LayerArguments
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.parallel.peers import Peers

__all__ = ["Dispatcher", "MicroBatch"]

_MEGATRONS_WARM_UP = 3  # by default


def _warm_up_of(config: Any, ours: int | None) -> int:
    """Eager training steps before the capture: as the plugin is told, or as the model's own config says."""
    option = "cuda_graph_warmup_steps"
    theirs = int(getattr(config, option, _MEGATRONS_WARM_UP))
    if ours is None and theirs != _MEGATRONS_WARM_UP:
        log.info("%d steps of warm-up, as %s in the model's config says", max(theirs, 1), option)
    return max(theirs, 1) if ours is None else ours


class Dispatcher(_C.Dispatcher):
    """csrc/python/dispatcher.h, Note [Dispatch], and the capacities among which it picks.

    If packs say by how many ranks they are shared, the group that one names has to be the very object that
    graphs were captured with, since their collectives are of its communicator.
    """

    def __init__(self, model_config: Any, config: GraphConfig, tables: LayerArguments, peers: Peers) -> None:
        context = peers.context
        # Whether ranks of other packs run as many rows in each micro-batch.
        self.needs_equal_rows = need_equal_rows(model_config)
        self.warm_up_steps = _warm_up_of(model_config, config.cuda_graph_warmup_steps)
        super().__init__(
            extra_seqs=config.tail.extra_seqs,
            depends_on_longest=tables.depend_on_max_seqlen,
            needs_equal_rows=self.needs_equal_rows,
            masks_tail=has_experts(model_config),
            pads_at_entry=peers.tensor.shards_sequence,
            is_own_table=tables.include,
            is_by_token=tables.is_by_token,
            may_be_by_token=not model_config.apply_rope_fusion and context.sizes == (1,),
            cuts_tables=tables.are_cut,
            is_eager=config.mode == "eager",
            cp_size=context.size,
            ranks=peers.size,
            run_alike=not peers.run_other_packs,
            warm_up_steps=self.warm_up_steps,
        )
        self._tail, self._context, self._tensor = config.tail, context, peers.tensor
        # Of tokens: each rank has a share of two parts of every document, and of the rows between the layers.
        self.multiple = math.lcm(1 + (context.sizes[-1] > 1), peers.tensor.row_shares)
        self._waited = 0  # steps
        largest = context.sizes[-1]
        for each in config.all_capacities(largest):
            if each.max_seqlen > each.tokens * largest:
                raise ValueError(
                    f"max_seqlen: expected at most the {each.tokens * largest} tokens of a pack, got "
                    f"{each.max_seqlen}"
                )
        known = {  # no document is longer than a pack, of fewer ranks than some others have
            size: tuple(
                each.replace(max_seqlen=min(each.max_seqlen, each.tokens * size))
                for each in config.all_capacities(size)
            )
            for size in context.sizes
        }
        self.set_capacities(known if any(known.values()) else {})
        if self._context.is_dynamic:  # groups by which packs are known that name theirs
            self.set_groups(self._context.by_size())

    def _each(self) -> Iterator[tuple[int, Capacity]]:
        """Every capacity, with the number of ranks that share its packs."""
        return ((size, capacity) for size, its in self.by_cp_size.items() for capacity in its)

    def check(self) -> None:
        """Raises `ValueError` if the ranks of the model cannot run packs of these capacities."""
        numbers = sorted({capacity.tokens for _size, capacity in self._each()})
        if self.needs_equal_rows and len(numbers) > 1:
            raise ValueError(
                "experts are spread over ranks and take as many rows from each: expected capacities of one "
                f"number of tokens, got {', '.join(map(str, numbers))}; set max_seqlen_per_dp_cp_rank to the "
                "largest, and cuda_graph_max_packed_seqs"
            )
        for cp_size, capacity in self._each():
            self._tensor.rows(capacity.tokens)
            if cp_size > 1 and capacity.tokens % 2:
                raise ValueError(
                    f"expected capacities of an even number of tokens, which {cp_size} context-parallel "
                    f"ranks share, got {capacity.tokens}"
                )
            self._tail.check(capacity, cp_size)

    def learn(self, max_over_ranks: MaxOverRanks) -> None:
        """Before a step: learns capacities from packs of the warm-up, once that of all ranks is over.

        Ranks need not have counted the same packs: one may not have been able to read some, or has offsets
        that are longer. So all of them learn the same from the most that any has met.
        """
        extra_seqs, sizes, is_warm = self._tail.extra_seqs, self._context.sizes, self.has_seen_enough()
        said = int(not is_warm), int(self.has_trained()), *self.needs()
        somebody_waits, somebody_trains, tokens, *num_seqs = max_over_ranks(said)
        if somebody_waits:
            self._waited += is_warm
            if is_warm and self._waited == PATIENCE:
                log.warning(
                    "still waits to learn capacities, %d steps after its warm-up: another rank that runs the "
                    "same packs could not read enough of its own; set cuda_graph_max_packed_seqs and "
                    "max_seqlen_per_dp_cp_rank, or see that rank's report",
                    PATIENCE,
                )
            return
        tokens += -tokens % self.multiple
        learned = {size: capacities_for([tokens, *num_seqs], extra_seqs, size) for size in sizes}
        self.set_capacities(learned, of_evaluations=not somebody_trains)
        log.info(
            "learned from %d pack shapes; to fix them set cuda_graph_max_packed_seqs=%s and "
            "max_seqlen_per_dp_cp_rank=%d",
            len(self.observed),
            ",".join(str(capacity.num_seqs) for capacity in self.by_cp_size[self._context.size]),
            tokens,
        )

    def variants(self, kinds: Iterable[VariantKey]) -> list[VariantKey]:
        """What is captured of kinds, which have no capacity: largest groups first, alike on all ranks."""
        ordered = sorted(kinds, key=lambda kind: (-kind.cp_size, repr(kind)))
        return [kind.replace(capacity=each) for kind in ordered for each in self.by_cp_size[kind.cp_size]]

    def report(self) -> list[dict[str, Any]]:
        """The capacities as plain values."""
        return [
            capacity.as_dict() | ({"cp_size": size} if len(self.by_cp_size) > 1 else {})
            for size, capacity in self._each()
        ]
