# SPDX-License-Identifier: Apache-2.0
"""The loop that replays each variant of a block, with the arguments that its layers were captured with.

Captures nothing, and decides on no micro-batch.
"""

from collections.abc import Callable

from megagraph.bank.chain import Chain
from megagraph.decide.dispatch import Capacity
from megagraph.megatron.graphs.layer_arguments import LayerArguments
from megagraph.megatron.graphs.micro_batch import Kind
from megagraph.megatron.scopes.layer import LayerLoop

__all__ = ["Key", "Loops"]

Key = tuple[Capacity, Kind]


class Loops:
    """The loops of one bank.

    Args:
        chain: the block's layers.
        constants: what they are called with beside a pack.
        before_layers: as `LayerLoop` takes it.

    Attributes:
        by_key: the loop of each variant.
    """

    def __init__(
        self,
        chain: Chain,
        constants: LayerArguments,
        before_layers: Callable[[], Callable[[int], None] | None],
    ) -> None:
        self._chain = chain
        self._before_layers = before_layers
        self.by_key: dict[Key, LayerLoop] = {}
        self._constants = constants

    def follow(self) -> None:
        """Makes loops of variants that were captured, and lets go of those that were dropped."""
        variants, chain = self._chain.variants, self._chain
        for key in variants.keys() - self.by_key.keys():
            self.by_key[key] = LayerLoop(chain, self._constants[key], self._before_layers)
        for key in self.by_key.keys() - variants.keys():
            del self.by_key[key], self._constants[key]
