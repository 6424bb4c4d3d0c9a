# SPDX-License-Identifier: Apache-2.0
"""Decides which variant takes a micro-batch, in C++, in the words of Python.

If packs say by how many ranks they are shared, the group that one names has to be the very object that graphs
were captured with, since their collectives are of its communicator.
"""

import functools
from typing import Any

from megagraph import _C
from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.megatron.graphs.micro_batch import Kind
from megagraph.megatron.graphs.positions import OwnTables
from megagraph.megatron.parallel.context import ContextRanks
from megagraph.packs.packing import PackForm, TailConvention

__all__ = ["Decider"]


class Decider(_C.Decider):
    """Decides on the packs of one model: `decide(params, tokens, has_mask, state_of_call, cp_size)`.

    `state_of_call` numbers the state that the layers are in, and `cp_size` is that of packs that do not say
    their own. It answers with a variant's name, whose capacity is None while capacities are still to be
    learned, or with the `EagerReason` why no graph of the model can take the micro-batch.

    Args:
        capacities: of the model's graphs.
        tail: the convention of its canonical packs.
        tables: the model's rotary tables.
        masks_tail: its layers are given a padding mask in any case, of what lies past a pack's end.
        context: the ranks that may share packs.
    """

    def __init__(
        self,
        capacities: Capacities,
        tail: TailConvention,
        tables: OwnTables,
        masks_tail: bool,
        context: ContextRanks,
    ) -> None:
        rotary = tables.depend_on_max_seqlen, tables.are_cut
        key = functools.partial(_key, masks_tail)
        super().__init__(tail.extra_seqs, *rotary, list(EagerReason), key)
        self._capacities = capacities
        self.heed_groups(context)
        self.follow()

    def heed_groups(self, context: ContextRanks) -> None:
        """Takes note of the groups by which packs are known that name theirs. Before steps."""
        if context.is_dynamic:
            context.look_up()
            self.set_groups(dict(context.by_size()))

    def follow(self) -> None:
        """Takes note of capacities that were learned."""
        self.set_capacities(self._capacities.for_decider())


def _key(masks_tail: bool, capacity: Capacity | None, *of_kind: Any) -> tuple[Capacity | None, Kind]:
    """The name of a variant: its capacity, then the values of its form and of its kind."""
    form = len(PackForm._fields)
    *of_call, cp_size = of_kind[form:]
    return capacity, Kind._make([PackForm(*of_kind[:form]), *of_call, masks_tail, cp_size])
