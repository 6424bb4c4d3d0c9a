# SPDX-License-Identifier: Apache-2.0
"""Says what graphs and their modules make differently."""

from dataclasses import dataclass

__all__ = ["Difference"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor of a site that its graph and its module make differently.

    Args:
        slot: whose graph.
        index: the site.
        tensor: what differs, in words.
        largest: between the graph and the module, over all entries.
        spread: between runs of the module.
    """

    slot: int
    index: int
    tensor: str
    largest: float
    spread: float

    @property
    def place(self) -> tuple[int, int, str]:
        """What differs: of which slot and site, which tensor."""
        return self.slot, self.index, self.tensor

    def __str__(self) -> str:
        own = f", and it differs from itself by up to {self.spread:.3g}" if self.spread else ""
        return f"{self.tensor} differs from eager by up to {self.largest:.3g}{own}"
