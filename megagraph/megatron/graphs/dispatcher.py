# SPDX-License-Identifier: Apache-2.0
"""Decides in C++ on the micro-batches of one model; told here what it has to know of the model.

If packs say by how many ranks they are shared, the group that one names has to be the very object that graphs
were captured with, since their collectives are of its communicator.
"""

import functools

from megagraph import _C
from megagraph.config import GraphConfig
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.megatron.graphs.micro_batch import BatchRules, Variant
from megagraph.megatron.parallel.peers import Peers

__all__ = ["Dispatcher"]


class Dispatcher(_C.Dispatcher):
    """csrc/python/dispatcher.h, Note [Dispatch].

    Args:
        config: the plugin's options.
        capacities: of the model's graphs.
        rules: what its micro-batches have in common.
        peers: the ranks that run the same packs.
    """

    def __init__(self, config: GraphConfig, capacities: Capacities, rules: BatchRules, peers: Peers) -> None:
        tables = rules.own_tables
        super().__init__(
            functools.partial(Variant, rules),
            extra_seqs=config.tail.extra_seqs,
            depends_on_longest=tables.depend_on_max_seqlen,
            cuts_tables=tables.are_cut,
            needs_equal_rows=capacities.need_equal_rows,
            is_eager=config.mode == "eager",
            cp_size=capacities.cp_size,
            ranks=peers.size,
            run_alike=not peers.run_other_packs,
            warm_up_steps=config.cuda_graph_warmup_steps,
        )
        self._capacities, self._context = capacities, peers.context
        self.heed_groups()
        self.follow_capacities()

    def heed_groups(self) -> None:
        """Takes note of the groups by which packs are known that name theirs. Before steps."""
        if self._context.is_dynamic:
            self._context.look_up()
            self.set_groups(dict(self._context.by_size()))

    def follow_capacities(self) -> None:
        """Takes note of capacities that were learned."""
        self.set_capacities(self._capacities.by_cp_size)
