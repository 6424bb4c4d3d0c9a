# SPDX-License-Identifier: Apache-2.0
"""Keeps real micro-batches for graphs to be verified on, and says which layers' graphs are wrong."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagraph._C import Capacity, PackShape, VariantKey
from megagraph.bank.backends import KeptMemoryError
from megagraph.bank.bank import Bank
from megagraph.bank.capture import GroupGaveUp
from megagraph.bank.verify import Difference, Example, verify
from megagraph.config import GraphConfig
from megagraph.log import log
from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.parallel.peers import HostGroup, Peers
from megagraph.packs.ops import thd_partition_indices
from megagraph.reasons import EagerReason, Why

__all__ = ["Verifier", "found_anywhere"]

# Micro-batches that ran eager for these are no examples: nothing is captured for them.
_ARE_NO_EXAMPLES = (
    *(EagerReason.DISABLED, EagerReason.SUSPENDED),
    *(EagerReason.TOO_MANY_SEQUENCES, EagerReason.SEQUENCE_TOO_LONG),
)


def found_anywhere(
    peers: HostGroup, found: Mapping[int, Why], num_sites: int, elsewhere: str
) -> Mapping[int, Why]:
    """Sites, by index, of which some rank of the group has found something; `elsewhere` if not this one.

    Raises `GroupGaveUp` if another rank has given the capture up.
    """
    if peers.max_over_ranks([0]) != [0]:  # one has given up meanwhile, and says so by one number
        raise GroupGaveUp
    anywhere = peers.max_over_ranks([int(index in found) for index in range(num_sites)])
    disagreed = EagerReason.GROUP_DISAGREED, elsewhere
    return {index: found.get(index, disagreed) for index, is_found in enumerate(anywhere) if is_found}


@dataclass(kw_only=True)
class _Kept(Example):
    """A micro-batch, in memory of its own."""

    shape: PackShape
    capacity: Capacity | None  # to whose rows it was padded before it was entered, where ranks share them

    def fits(self, capacity: Capacity) -> bool:
        """Whether a capacity holds it."""
        return self.shape.exceeds(capacity) is None and self.capacity in (None, capacity)

    def take_grad(self, grad: Tensor) -> None:
        """A hook of the block's output."""
        self.grad = grad.detach().clone()


class Verifier:
    """Verifies the graphs of one model, together with the ranks that run the same packs."""

    def __init__(self, config: GraphConfig, peers: Peers) -> None:
        option, self._tail = config.verify, config.tail
        self._peers = peers
        self._tensor, self._context = peers.tensor, peers.context
        self._is_on = option != "off"
        # One of as many replayed micro-batches is kept; 0 for none. Ranks of other packs replay others, and
        # would have to agree on which they verify.
        self.every = option if isinstance(option, int) and not peers.run_other_packs else 0
        # By a variant's key of no state, with the capacity that was picked if there were any yet.
        self._kept: dict[VariantKey, _Kept] = {}
        self._replayed = 0
        # Due to be verified again: one in each state for training, and one for passes without gradients.
        self.pending: dict[tuple[int, bool], VariantKey] = {}
        self._verified = self._bytes = 0
        self._seconds = 0.0
        self._within_spread: set[str] = set()
        self._kept_memory: str | None = None  # why no graph may run any more

    # -- examples --------------------------------------------------------------------------------

    def keep(self, batch: MicroBatch, hidden_states: Tensor) -> None:
        """Keeps a micro-batch that is about to run eager, and what its block was given.

        One that runs on fewer rows than graphs of ranks that share them is none to verify these on.
        """
        runs_fewer = self._tensor.shards_sequence and (batch.capacity is None or batch.is_as_given)
        if self._is_on and not runs_fewer and batch.reason not in _ARE_NO_EXAMPLES:
            self._keep(batch, hidden_states)

    def keep_replayed(self, batch: MicroBatch, hidden_states: Tensor) -> None:
        """Keeps one of as many replayed micro-batches as were asked for."""
        self._replayed += 1
        if self._replayed % self.every == 0:
            self._keep(batch, hidden_states)
            self.pending[batch.key.state, batch.key.grad] = batch.key

    def _keep(self, batch: MicroBatch, hidden_states: Tensor) -> None:
        capacity = batch.capacity if self._tensor.shards_sequence else None
        shape = PackShape.of(batch.params, batch.tokens, self._tail.extra_seqs, batch.key.cp_size)
        if shape is not None:
            of_state = batch.key.replace(state=0)
            for former in (of_state, batch.key.family):  # the latest come last
                self._kept.pop(former, None)
            self._kept[of_state] = _Kept(
                shape=shape,
                capacity=capacity,
                hidden=hidden_states.detach().clone(),
                sources=[source.clone(memory_format=torch.contiguous_format) for source in batch.sources],
            )

    def keep_gradient(self, batch: MicroBatch, out: Tensor) -> None:
        """Keeps the gradient of the block's output, too, when it comes."""
        kept = self._kept.get(batch.key.replace(state=0))
        if kept is not None and kept.grad is None and out.requires_grad:
            out.register_hook(kept.take_grad)

    # -- graphs ----------------------------------------------------------------------------------

    def failing(self, bank: Bank, keys: Sequence[VariantKey]) -> Mapping[int, Why]:
        """Verifies variants by the micro-batches that they hold of those that were kept.

        Returns the layers, by index, whose graphs are wrong, here or on another rank: why, in words.
        """
        if not self._is_on:
            return {}
        found: dict[int, Why] = {}
        for key in keys:
            for difference in self._verify(bank, key):
                found.setdefault(difference.index, (EagerReason.VERIFY_FAILED, str(difference)))
            if self._kept_memory is not None and key in bank.variants:
                why = EagerReason.VERIFY_FAILED, self._kept_memory
                found = dict.fromkeys(range(len(bank.specs)), why)
        elsewhere = "its graph is wrong on another rank of the group"
        return found_anywhere(self._peers, found, len(bank.specs), elsewhere)

    def _verify(self, bank: Bank, key: VariantKey) -> Sequence[Difference]:
        kept = self._example(key)
        can = key in bank.variants and kept is not None
        if bank.options.somewhere(not can) or kept is None:
            why = "no micro-batch that fits was kept"
            self._note_unverified(bank, key, dict.fromkeys(bank.graphable(), why))
            return ()
        start = time.perf_counter()
        kept.valid_rows = self._valid_rows(kept, key)
        try:
            verification = verify(bank, key, kept)
        except KeptMemoryError as error:
            self._kept_memory = f"a module keeps memory of its call, over which graphs would write: {error}"
            return ()
        except Exception as error:  # of a module's own call: no reason to think that its graph is wrong
            if self._peers.size > 1 and isinstance(error, torch.OutOfMemoryError):
                raise
            own = None if isinstance(error, GroupGaveUp) else f"{type(error).__name__}: {error}"
            what = "; ".join(filter(None, self._peers.gather(own)))
            log.warning("graphs for %s could not be verified, and are used: %s", key.capacity, what)
            self._note_unverified(bank, key, dict.fromkeys(bank.graphable(), what))
            return ()
        finally:
            self._seconds += time.perf_counter() - start
        why = "its graph did not take the micro-batch that was kept"
        not_run = {index: f"{why} ({reason})" for index, reason in verification.not_run.items()}
        self._note_unverified(bank, key, not_run)
        self._verified += not not_run
        self._bytes = max(self._bytes, verification.most_bytes)
        self._within_spread |= {bank.specs[index].name for index in verification.within_spread}
        return verification.differences

    def _example(self, key: VariantKey) -> _Kept | None:
        """A micro-batch that a variant holds: one that was padded to its capacity, or else the latest."""
        capacity, family = key.capacity, key.family
        assert capacity is not None
        own = self._kept.get(key.replace(state=0))
        others = (kept for other, kept in reversed(self._kept.items()) if other.kind == family)
        fitting = (kept for kept in others if kept.fits(capacity))
        # A wrong graph shows in rows that somebody reads, on whichever rank.
        return next((it for it in (own, *fitting) if it is not None and it.sources[0][-1] > 0), None)

    def _note_unverified(self, bank: Bank, key: VariantKey, sites: Mapping[int, str]) -> None:
        """Takes note of the sites of a variant, by index, that have graphs and were not compared, and why."""
        captured = bank.captured[bank.variants[key]] if key in bank.variants else None
        # All of them have been compared once: that stays so.
        if captured is not None and (not sites or captured.not_compared != {}):
            captured.not_compared = sites

    def _valid_rows(self, kept: _Kept, key: VariantKey) -> Tensor:
        """This rank's rows of documents, without the padding behind each of them and behind the last."""
        assert key.capacity is not None
        actual, physical = (kept.sources[which].cpu().long() for which in (0, int(key.form.has_padded)))
        held = torch.arange(int(physical[-1]), device="cpu")
        if (group := self._context.of_size(key.cp_size)) is not None:
            held = thd_partition_indices(physical.int(), len(held), key.cp_size, group.rank()).long()
        document = torch.searchsorted(physical[1:], held, right=True)
        rows = (held - physical[document] < actual.diff()[document]).nonzero().flatten()
        count = self._tensor.rows(key.capacity.tokens)
        first = count * self._tensor.rank() if self._tensor.shards_sequence else 0
        here = (rows >= first) & (rows < first + count)
        return (rows[here] - first).to(kept.hidden.device)

    def forget_except(self, due: Collection[VariantKey], pending: Collection[VariantKey] = ()) -> None:
        """Lets go of what was kept, but for kinds due in another state, and for `pending` variants."""
        families, awaited = {kind.family for kind in due}, {key.replace(state=0) for key in pending}
        self._kept = {key: kept for key, kept in self._kept.items() if key.kind in families or key in awaited}
        self.pending = {place: key for place, key in self.pending.items() if key in pending}

    def describe(self, bank: Bank) -> str:
        """How many variants were verified, and what that cost, for the log."""
        unverified = sum(bool(captured.not_compared) for captured in bank.captured.values())
        could_not = f", {unverified} could not be" if unverified else ""
        return f"{self._verified} verified in {self._seconds:.2f} s{could_not}"

    def report(self, bank: Bank) -> dict[str, Any]:
        """What was verified, what it cost, and which layers differ from themselves in eager."""
        unverified = [captured for captured in bank.captured.values() if captured.not_compared]
        return {
            "verified": self._verified,
            "unverified": len(unverified),
            "unverified_sites": [
                {"variant": str(captured.spec), "site": bank.specs[index].name, "why": why}
                for captured in unverified
                for index, why in (captured.not_compared or {}).items()
            ],
            "seconds": self._seconds,
            "bytes": self._bytes,
            "within_spread": sorted(self._within_spread),
        }
