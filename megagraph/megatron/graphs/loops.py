# SPDX-License-Identifier: Apache-2.0
"""The loop that replays each variant of a block, with the arguments that its layers were captured with.

Captures nothing, and decides on no micro-batch.
"""

from collections.abc import Callable

from megagraph.bank.chain import Chain
from megagraph.decide.dispatch import Capacity
from megagraph.megatron.graphs.layer_arguments import LayerArguments
from megagraph.megatron.graphs.micro_batch import Kind
from megagraph.megatron.scopes.plan import BlockPlan
from megagraph.megatron.scopes.walk import LayerLoop

__all__ = ["Key", "Loops"]

Key = tuple[Capacity, Kind]


class Loops:
    """The loops of one bank.

    Args:
        plan: the steps of the block's layers.
        chain: of these.
        constants: what they are called with beside a pack.
        before_sites: as `LayerLoop` takes it.

    Attributes:
        by_key: the loop of each variant.
    """

    def __init__(
        self,
        plan: BlockPlan,
        chain: Chain,
        constants: LayerArguments,
        before_sites: Callable[[], Callable[[int], None] | None],
    ) -> None:
        self._plan = plan
        self._chain = chain
        self._before_sites = before_sites
        self.by_key: dict[Key, LayerLoop] = {}
        self._constants = constants

    def follow(self) -> None:
        """Makes loops of variants that were captured, and lets go of those that were dropped."""
        variants, chain = self._chain.variants, self._chain
        for key in variants.keys() - self.by_key.keys():
            self.by_key[key] = LayerLoop(self._plan, chain, self._constants[key], self._before_sites)
        for key in self.by_key.keys() - variants.keys():
            del self.by_key[key], self._constants[key]
