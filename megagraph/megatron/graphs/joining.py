# SPDX-License-Identifier: Apache-2.0
"""Which neighbouring layers are one site, with one graph for each pass (`cuda_graph_granularity="chunk"`).

Note [Joining]
Neighbouring whole layers are joined before the first capture of a bank, as far as each can be graphed, and
up to where a bucket of gradients ends that is reduced in the backward pass, or gathered in the forward pass.
A site of several layers that cannot be captured, or is wrong, says nothing of the layer at fault. So its
layers are captured again one by one, which names those at fault; these stay eager, and what is left is joined
once more. Where no layer fails by itself they stay apart. Ranks that run the same packs hear of the same
failures, and so join alike.
"""

from collections.abc import Callable, Mapping

from torch import nn

from megagraph.bank.capture import MaxOverRanks
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron.graphs.block_layers import BlockLayers
from megagraph.megatron.parallel.ddp import borders_of

__all__ = ["Joining", "Why"]

Why = tuple[EagerReason, str]


class Joining:
    """Joins the layers of one block.

    Args:
        layers: of the block.
        may_join: asked whether layers are called by Megatron's own loop, so that one may stand for several.
    """

    def __init__(self, layers: BlockLayers, may_join: Callable[[], bool]) -> None:
        self._layers = layers
        self._may_join = may_join
        self._apart: set[int] = set()  # layers whose site of several has failed
        self._wrong: dict[int, Why] = {}  # those of them that were at fault
        self._has_said_why = False

    def part_where_needed(self) -> bool:
        """Parts layers that must not be joined any more. Returns whether there were such."""
        layers = self._layers
        if not layers.are_joined or self._may_join():
            return False
        layers.part()
        return True

    def forget(self) -> None:
        """Other layers have come: nothing is known of them."""
        self._apart.clear()
        self._wrong.clear()

    def join(self, ddp: nn.Module | None, max_over_ranks: MaxOverRanks) -> None:
        """Before the first capture of a bank.

        Args:
            ddp: Megatron's DDP around the model, or None.
            max_over_ranks: asks the ranks that run the same packs.
        """
        layers = self._layers
        layers.part()
        left = layers.ineligible_in_group(ddp, max_over_ranks)
        if self._may_join():
            layers.join(borders_of(ddp, layers.specs), {*left, *self._apart, *self._wrong})
        if len(layers.specs) == layers.num_sites > 1 and not self._has_said_why:
            self._has_said_why = True
            log.warning("cuda_graph_granularity='chunk' joins no layers: %s", self._unsupported())

    def _unsupported(self) -> str:
        if not self._may_join():
            return "a forward that overrides Megatron's calls them one by one"
        plan = self._layers.plan
        if not any(step.is_whole for step in plan.steps):
            return "cuda_graph_modules leaves something eager in each of them"
        return "each stands by itself between buckets of gradients, or between layers that stay eager"

    def at_fault(self) -> Mapping[int, Why]:
        """Present sites, by index, that were found to be at fault before, and why."""
        places = self._layers.places
        return {
            index: self._wrong[place.start]
            for index, place in enumerate(places)
            if place.start in self._wrong
        }

    def agree(self, failed: Mapping[int, Why]) -> bool:
        """Learns which of the present sites failed, by index, and why.

        Returns:
            Whether the block is to be captured again, with other sites.
        """
        places = self._layers.places
        of_several = {place for index in failed if len(places[index]) > 1 for place in places[index]}
        found = {
            places[index].start: why
            for index, why in failed.items()
            if len(places[index]) == 1 and places[index].start in self._apart - self._wrong.keys()
        }
        if found:
            self._wrong |= found
            self._apart.clear()
        self._apart |= of_several
        return bool(of_several or found)
