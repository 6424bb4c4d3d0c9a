# SPDX-License-Identifier: Apache-2.0
"""The capacities of one model: as configured, or learned from the packs of its warm-up.

Note [Equal rows]
Experts over several ranks may take as many rows from each: with a dispatcher that gathers all rows, or if
they are padded to a capacity. Each rank has packs of its own and asks nobody about them. So the capacities of
such a model have one number of rows, the same on all ranks, and every micro-batch has that many, in eager
too. A pack of too many documents, or of one that is too long, is padded to a capacity of its own, without
graphs (csrc/python/dispatcher.cpp); what cannot be padded has just that many rows, or is an error. Until
capacities are known packs run as given, and need equal rows as with Megatron alone. All ranks learn them at
the same step boundary.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from megagraph.bank.capture import MaxOverRanks
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity, Needs, PackShape, VariantKey, capacities_for, needs_of
from megagraph.log import log
from megagraph.packs.packing import TailConvention

__all__ = ["Capacities"]

_PATIENCE = 20  # steps that this rank waits for another one until it says so


def _bounded(capacity: Capacity, cp_size: int) -> Capacity:
    """With documents that are no longer than a pack of fewer ranks than some others have."""
    longest = min(capacity.max_seqlen, capacity.tokens * cp_size)
    return capacity.replace(max_seqlen=longest)


class Capacities:
    """What packs the graphs of one model can hold.

    Args:
        config: the plugin's options.
        cp_size: ranks that share a pack that does not say by how many it is shared.
        cp_sizes: how many may share one, that among them.
        need_equal_rows: every micro-batch has as many rows (Note [Equal rows]).

    Attributes:
        cp_size, need_equal_rows: as given.
        by_cp_size: smallest first; empty while they are still to be learned.
    """

    def __init__(
        self,
        config: GraphConfig,
        cp_size: int = 1,
        cp_sizes: Sequence[int] = (1,),
        *,
        need_equal_rows: bool = False,
    ) -> None:
        self.cp_size, self.need_equal_rows = cp_size, need_equal_rows
        known = {
            size: tuple(_bounded(each, size) for each in config.all_capacities(size)) for size in cp_sizes
        }
        self.by_cp_size: Mapping[int, Sequence[Capacity]] = known if any(known.values()) else {}
        self._cp_sizes = tuple(cp_sizes)
        self._tail, self._extra_seqs = config.tail, config.tail.extra_seqs
        self._waited = 0  # steps

    @property
    def known(self) -> Sequence[Capacity]:
        """Those of packs that do not say by how many ranks they are shared."""
        return self.by_cp_size.get(self.cp_size, ())

    @property
    def rows(self) -> int | None:
        """Of every micro-batch; None where the number is free, or not known yet."""
        return self.known[0].tokens if self.need_equal_rows and self.known else None

    def check(self, rows: Callable[[int], int]) -> None:
        """Raises `ValueError` where the ranks of the model cannot run packs of these capacities.

        Args:
            rows: from tokens of a pack to those of a tensor-parallel rank, likewise.
        """
        numbers = sorted({capacity.tokens for capacity in self.known})
        if self.need_equal_rows and len(numbers) > 1:
            raise ValueError(
                "experts are spread over ranks and take as many rows from each: expected capacities of one "
                f"number of tokens, got {', '.join(map(str, numbers))}; set max_seqlen_per_dp_cp_rank to the "
                "largest, and cuda_graph_max_packed_seqs"
            )
        for cp_size, capacities in self.by_cp_size.items():
            for capacity in capacities:
                rows(capacity.tokens)
                self._check_context(capacity, cp_size)

    def _check_context(self, capacity: Capacity, cp_size: int) -> None:
        if cp_size > 1 and capacity.tokens % 2:
            raise ValueError(
                f"expected capacities of an even number of tokens, which {cp_size} context-parallel "
                f"ranks share, got {capacity.tokens}"
            )
        if self._tail is not TailConvention.HIDDEN and capacity.max_seqlen < capacity.tokens * cp_size:
            raise ValueError(
                f"tail: {self._tail.value!r} makes a document as long as the tail, which needs a "
                f"max_seqlen of {capacity.tokens * cp_size}, got {capacity.max_seqlen}"
            )

    def learn(self, observed: Collection[PackShape], is_warm: bool, max_over_ranks: MaxOverRanks) -> bool:
        """Learns them from packs of the warm-up, the same on all ranks, once that of all is over.

        Ranks need not have counted the same packs: one may not have been able to read some, or has offsets
        that are longer.

        Args:
            observed: what they needed.
            is_warm: the warm-up of this rank is over.
            max_over_ranks: asks the ranks, in each step until they have learned.

        Returns:
            Whether they have.
        """
        here = needs_of(observed, self._extra_seqs)
        somebody_waits, *needs = max_over_ranks([int(not is_warm), *here])
        if somebody_waits:
            self._waited += is_warm
            if is_warm and self._waited == _PATIENCE:
                log.warning(
                    "still waits to learn capacities, %d steps after its warm-up: another rank that runs the "
                    "same packs could not read enough of its own; set cuda_graph_max_packed_seqs and "
                    "max_seqlen_per_dp_cp_rank, or see that rank's report",
                    _PATIENCE,
                )
            return False
        found = Needs(*needs)
        if self._cp_sizes[-1] > 1:  # each rank has a share of two parts of every document
            found = found._replace(tokens=found.tokens + found.tokens % 2)
        self.by_cp_size = {size: capacities_for(found, self._extra_seqs, size) for size in self._cp_sizes}
        counts = ",".join(str(capacity.num_seqs) for capacity in self.known)
        log.info(
            "learned from %d pack shapes; to fix them set cuda_graph_max_packed_seqs=%s and "
            "max_seqlen_per_dp_cp_rank=%d",
            len(observed),
            counts,
            self.known[0].tokens,
        )
        return True

    def variants(self, kinds: Iterable[VariantKey]) -> list[VariantKey]:
        """What is captured of some kinds: largest groups first, and in one order on all ranks.

        Args:
            kinds: of micro-batches, without a capacity.
        """
        ordered = sorted(kinds, key=lambda kind: (-kind.cp_size, repr(kind)))
        return [kind.replace(capacity=each) for kind in ordered for each in self.by_cp_size[kind.cp_size]]

    def report(self) -> list[dict[str, Any]]:
        """As plain values."""
        return [
            capacity.as_dict() | ({"cp_size": size} if len(self._cp_sizes) > 1 else {})
            for size, capacities in self.by_cp_size.items()
            for capacity in capacities
        ]
