# SPDX-License-Identifier: Apache-2.0
"""Has ranks agree on the rows of their packs, where experts take as many rows from each of them.

Note [Equal rows]
Experts over several ranks see the packs of all of them. A dispatcher that gathers all rows, and experts that
are padded to a capacity, take as many rows from each rank. Megatron alone leaves that to whoever packs. A
canonical pack has the rows of its capacity, and ranks with packs of their own would each choose another one.
So they vote before each forward, in one collective: for each number of rows that there are capacities of, a
rank says whether one of these holds its pack, and all take the least number that every pack has a place in.
With that number each rank goes its own way, replays or runs eager on its canonical pack: no graph holds
anything of these ranks. Where one pack has no place at all every rank runs its own as it was given, as
Megatron alone does. Then the vote has told whether these have equal rows, and it is an error on all ranks
if they have not, in place of a dispatch that fails or waits for ever.

Every rank votes in every micro-batch, whatever it thinks of it: one that says nothing, or has fewer of them,
keeps the others waiting. Megatron's dispatch would as well.
"""

from collections.abc import Callable, Sequence
from typing import Any

from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.megatron.graphs.micro_batch import MicroBatch
from megagraph.megatron.graphs.positions import OwnTables
from megagraph.megatron.parallel.groups import ranks_of
from megagraph.megatron.parallel.peers import HostGroup
from megagraph.megatron.parallel.sharing import need_equal_rows
from megagraph.megatron.scopes.moe import experts_of
from megagraph.megatron.scopes.moe_preprocess import most_routed
from megagraph.packs.packing import TailConvention, pack_shape

__all__ = ["NEEDS_MEGATRONS", "EqualRows", "equal_rows_of"]

# Of a model that a host's forward enters: what that makes of a micro-batch shows behind the vote.
NEEDS_MEGATRONS = (
    "experts over several ranks that need equal rows, in a model with a forward that is not Megatron's, "
    "are not supported yet"
)


class EqualRows:
    """The vote of one model's ranks.

    Args:
        ranks: those that its experts are spread over.
        taken: from the rows of a pack to what a dispatcher takes from each rank.
        capacities: of the model's graphs, the same on all ranks.
        tail: the convention of its canonical packs.
        tables: the model's rotary tables.
    """

    def __init__(
        self,
        ranks: HostGroup,
        taken: Callable[[int], int],
        capacities: Capacities,
        tail: TailConvention,
        tables: OwnTables,
    ) -> None:
        self.ranks = ranks
        self._taken = taken
        self._capacities = capacities
        self._tail, self._tables = tail, tables

    def agree(self, batch: MicroBatch | EagerReason, rows: int) -> MicroBatch | EagerReason:
        """Votes on a micro-batch. Every rank calls this equally often.

        Args:
            batch: what this rank has decided alone.
            rows: of its pack as it was given.

        Returns:
            What all ranks run on packs of equal rows: the micro-batch, perhaps padded to another capacity, or
            why it runs as it was given.

        Raises:
            RuntimeError: on all ranks, where packs as they were given have not as many rows.
        """
        places = self._places(batch)
        taken = self._taken(rows)
        has_none = [int(place is None) for place in places]
        *somebody_has_none, most, least = self.ranks.max_over_ranks([*has_none, taken, -taken])
        for place, is_missing in zip(places, somebody_has_none, strict=True):
            if place is not None and not is_missing:
                assert isinstance(batch, MicroBatch)
                return batch if place == batch.capacity else self._padded_to(place, batch)
        if most != -least:
            self._raise(batch, rows)
        if isinstance(batch, EagerReason):
            return batch
        return batch.as_given(EagerReason.GROUP_DISAGREED if batch.reason is None else batch.reason)

    def _places(self, batch: MicroBatch | EagerReason) -> Sequence[Capacity | None]:
        """For each number of rows, least first, the cheapest capacity of so many that holds the pack."""
        known = self._capacities.known
        numbers = sorted({capacity.tokens for capacity in known})
        if isinstance(batch, EagerReason):
            return [None] * len(numbers)
        shape = pack_shape(batch.params, batch.tokens, self._tail, cp_size=batch.kind.cp_size)
        assert shape is not None
        holding = sorted(capacity for capacity in known if shape.exceeds(capacity) is None)
        return [next((each for each in holding if each.tokens == rows), None) for rows in numbers]

    def _padded_to(self, capacity: Capacity, batch: MicroBatch) -> MicroBatch:
        key = capacity, batch.kind
        # Where ranks need equal rows tensor parallelism is refused, so that no rows are shared.
        return MicroBatch(batch.params, batch.tokens, key, batch.reason, self._tail, False, self._tables)

    def _raise(self, batch: MicroBatch | EagerReason, rows: int) -> None:
        own = f"({batch.name}) " if isinstance(batch, EagerReason) else ""
        raise RuntimeError(
            "experts are spread over ranks and take as many rows from each, but not every rank's pack fits a "
            f"capacity, and as they were given they differ: this rank's pack {own}has {rows} rows; expected "
            "packs that capacities of equal rows hold, or as many rows on every rank"
        )


def equal_rows_of(
    model: Any, capacities: Capacities, tail: TailConvention, tables: OwnTables
) -> EqualRows | None:
    """The vote of a model's ranks, or None where its experts take whatever each rank has.

    Args:
        model: the GPTModel or HybridModel, which is not refused.
        capacities: of its graphs.
        tail: the convention of its canonical packs.
        tables: its rotary tables.
    """
    if not need_equal_rows(model.config):
        return None
    mixture = next(found for layer in model.decoder.layers if (found := experts_of(layer)) is not None)
    dispatcher = mixture.token_dispatcher
    # In all layers; looked up once, since other ranks would have other experts.
    spread_over = ranks_of(dispatcher.tp_ep_group)
    ranks = HostGroup(lambda: spread_over, "share the experts")
    return EqualRows(ranks, _taken_by(dispatcher), capacities, tail, tables)


def _taken_by(dispatcher: Any) -> Callable[[int], int]:
    """From the rows of a pack to what a dispatcher takes from each rank."""
    if getattr(dispatcher, "drop_and_pad", False):  # those that gather all rows have none
        return most_routed(dispatcher)
    return lambda rows: rows
