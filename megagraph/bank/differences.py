# SPDX-License-Identifier: Apache-2.0
"""Says what graphs and their modules make differently."""

from dataclasses import dataclass

__all__ = ["MOST_FURTHER", "Difference"]

MOST_FURTHER = (
    3  # verifications: of dozens of tensors some differ by chance in two verifications, hardly any in four
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor of a site that its graph and its module make differently.

    Args:
        slot: whose graph.
        index: the site.
        tensor: what differs, in words.
        off: by how much the graph misses the module, at most.
        spread: how far runs of the module are apart, at most, where it does.
        is_noisy: runs of the module differ in this tensor.
        is_rounding: it is as small and as rare as what kernels that add with atomics make of one call.
    """

    slot: int
    index: int
    tensor: str
    off: float
    spread: float
    is_noisy: bool = False
    is_rounding: bool = False

    def may_be_chance(self, times: int) -> bool:
        """Whether it may not recur in further verifications, having recurred in `times` of them."""
        return times < (MOST_FURTHER if self.is_rounding else 1 if self.is_noisy else 0)

    @property
    def place(self) -> tuple[int, int, str]:
        """What differs: of which slot and site, which tensor."""
        return self.slot, self.index, self.tensor

    def __str__(self) -> str:
        own = f", and eager there from itself by up to {self.spread:.3g}" if self.is_noisy else ""
        return f"{self.tensor} differs from eager by up to {self.off:.3g}{own}"
