# SPDX-License-Identifier: Apache-2.0
"""Decides which variant takes a micro-batch, in C++, in the words of Python."""

import functools
from collections.abc import Mapping
from typing import Any

from megagraph import _C
from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.megatron.graphs.layer_states import LayerStates
from megagraph.megatron.graphs.micro_batch import Kind
from megagraph.megatron.graphs.positions import OwnTables
from megagraph.packs.packing import PackForm, TailConvention

__all__ = ["Decider"]


class Decider(_C.Decider):
    """Decides on the packs of one model: `decide(params, tokens, has_mask)`.

    It answers with a variant's name, whose capacity is None while capacities are still to be learned, or
    with the `EagerReason` why no graph of the model can take the micro-batch.

    Args:
        capacities: of the model's graphs.
        tail: the convention of its canonical packs.
        tables: the model's rotary tables.
        states: numbers the state that its layers are in.
        masks_tail: its layers are given a padding mask in any case, of what lies past a pack's end.
    """

    def __init__(
        self,
        capacities: Capacities,
        tail: TailConvention,
        tables: OwnTables,
        states: LayerStates,
        masks_tail: bool,
    ) -> None:
        rotary = tables.depend_on_max_seqlen, tables.are_cut
        key = functools.partial(_key, {"masks_tail": masks_tail, "cp_size": capacities.cp_size})
        super().__init__(tail.extra_seqs, *rotary, list(EagerReason), key, states.of_call)
        self._capacities = capacities
        self.follow()

    def follow(self) -> None:
        """Takes note of capacities that were learned."""
        known = self._capacities.known
        self.set_capacities({self._capacities.cp_size: known} if known else {})


def _key(
    of_model: Mapping[str, Any], capacity: Capacity | None, *of_kind: Any
) -> tuple[Capacity | None, Kind]:
    """The name of a variant: its capacity, then the values of its form and of its kind."""
    form = len(PackForm._fields)
    return capacity, Kind(PackForm(*of_kind[:form]), *of_kind[form:])._replace(**of_model)
