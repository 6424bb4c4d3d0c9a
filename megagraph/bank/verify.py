# SPDX-License-Identifier: Apache-2.0
"""Compares the graphs of a variant with the modules that they stand for, bit by bit, on a real micro-batch.

Note [Verification]
A graph may have baked in what nobody watches. So before it is used, a micro-batch runs both ways, site by
site: the graph of a site and its module get the same input, the same gradient, and the same random state.
Thus a difference is that of one site, and not of those before it. Forwards replay in order, so that every
boundary lies where it will lie. What stays eager is passed over: the next site takes the same input. Then,
from the last site to the first, the module runs forward and backward after the graph's backward. It runs in
memory of the graphs' own pool, that which later sites and this one need no more (csrc/torch/pool_loan.h, Note
[Lent memory]); beside it lie copies of what the graph made, among it the gradients of one site.

Afterwards gradients, buffers, random states and counters are as they were. Where a module differs from itself
(it adds with atomics), it runs several times more, and its graph has to lie within twice what these differ
by: it is one run more, and may well be the one that lies furthest from another. Where differences are rare
and of several sizes that is no bound, so that a graph which lies further off has to do so twice; and where no
more than roundings of few entries differ, four times, unless torch is asked for deterministic algorithms.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megagraph.bank.accumulators import swap_of, swapped
from megagraph.bank.agreement import Exchange
from megagraph.bank.backends import Backend, Lent
from megagraph.bank.bits import Range, Results, have_same_bits
from megagraph.bank.chain import CapturedVariant, Chain
from megagraph.bank.differences import Difference
from megagraph.bank.gradients import KeptGradients
from megagraph.bank.rng import RngSources, Snapshot
from megagraph.bank.sites import as_tuple
from megagraph.decide.reasons import EagerReason

__all__ = ["Example", "Verification"]

# Of a module that may differ from itself; up to as many in all where it does, but not yet in some tensor in
# which its graph does.
_FURTHER_RUNS, _MOST_RUNS = 4, 20
# Of what a site gets: gradients that pass over gaps may grow from site to site beyond what types hold.
_LARGEST_GRADIENT = 2.0**10
_INPUT = "gradient of the input"

_Run = Callable[[], contextlib.AbstractContextManager[Results]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A micro-batch of a variant.

    Args:
        hidden: the chain's input.
        sources: metadata as the variant's `MetadataSpec`s name it.
        grad: of the chain's output, of as many rows or fewer; None for ones.
        valid_rows: indices, on the chain's device, of the rows that anybody reads; None for all. Kernels may
            leave in padding whatever the memory held.
    """

    hidden: Tensor
    sources: Sequence[Tensor] = ()
    grad: Tensor | None = None
    valid_rows: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """One site between its forward and its backward."""

    index: int
    leaf: Tensor  # what the graph was given
    outputs: Sequence[Tensor]  # copies of those whose memory later passes use
    begins: Sequence[GradientEdge | None]  # where the backward of each output begins
    before: Snapshot


class Verification:
    """Compares one captured variant with its modules.

    Args:
        chain: with no micro-batch running.
        key: the variant.
        backend: the bank's; what runs runs inside of its `recording()`.
        rng: restored afterwards.
        example: what runs.
    """

    def __init__(
        self,
        chain: Chain,
        key: Any,
        backend: Backend,
        rng: RngSources,
        example: Example,
        exchange: Exchange,
    ) -> None:
        self._chain = chain
        self._key = key
        self._backend = backend
        self._rng = rng
        self._exchange = exchange
        self._example = example
        self._variant: CapturedVariant = chain.captured[chain.variants[key]]
        self._flights: list[_Flight] = []
        self._arguments: Mapping[str, Any] = {}
        self.differences: list[Difference] = []
        # Sites, by index, that differ from themselves and whose graphs lie within that.
        self.within_spread: set[int] = set()
        self.num_replays = 0
        self.most_bytes = 0  # on the device beside the graphs' own, where that can be told

    def run(self) -> EagerReason | None:
        """Runs the micro-batch both ways; `differences` says what came out.

        Returns:
            Why it could not run, or None.

        Raises:
            KeptMemoryError: where a module keeps memory of its call.
        """
        start = self._rng.snapshot()
        self._bytes_before = self._bytes_now()
        kept = [(tensor, tensor.clone()) for tensor in self._touched()]
        try:
            with (
                self._variant.spec.context(),
                self._chain.micro_batch(self._key, self._example.sources) as reason,
            ):
                if reason is None:
                    self._run_forwards()
                    self._run_backwards()
        finally:
            self._flights.clear()
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
            self._rng.restore(start)
        return reason

    def is_doubtful(self, times: int) -> bool:
        """Whether something differs, on any rank, that may be chance after `times` further verifications."""
        return self._somewhere(any(found.may_be_chance(times) for found in self.differences))

    def _somewhere(self, here: bool) -> bool:
        (found,) = self._exchange([int(here)])
        return bool(found)

    def keep_what_recurs(self, again: "Verification", times: int) -> None:
        """Forgets what may be chance and does not differ in another verification.

        Args:
            again: of the same graphs.
            times: how many there were between.
        """
        recurs, mine = {found.place for found in again.differences}, self.differences
        chance = [found for found in mine if found.may_be_chance(times) and found.place not in recurs]
        self.within_spread |= {found.index for found in chance}
        self.differences = [found for found in self.differences if found not in chance]

    def _in_valid_rows(self, output: Tensor) -> Tensor:
        valid, counts = self._example.valid_rows, (self._variant.spec.rows, self._example.hidden.shape[0])
        return output if valid is None or output.shape[0] not in counts else output.index_select(0, valid)

    def _bytes_now(self) -> int:
        device = self._example.hidden.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    def _touched(self) -> list[Tensor]:
        """What runs write beside gradients: buffers, and metadata with the counters among it."""
        metadata = [buffer for of_slot in self._variant.buffers for buffer in of_slot.values()]
        buffers = [buffer for spec in self._chain.specs for buffer in spec.buffers()]
        return [*{id(tensor): tensor for tensor in (*metadata, *buffers)}.values()]

    def _named(self, outputs: Sequence[Tensor]) -> Results:
        """The outputs of a site, by what they are in words."""
        return {_output(number): self._in_valid_rows(it.detach()) for number, it in enumerate(outputs)}

    # -- the graphs ------------------------------------------------------------------------------

    def _run_forwards(self) -> None:
        chain, training = self._chain, self._variant.spec.training
        self._arguments = self._variant.arguments(chain.core.slot_index, self._example.sources)
        given = self._example.hidden
        for index, site in enumerate(chain.sites):
            before = self._rng.snapshot()
            leaf = given.detach().requires_grad_(training)
            with torch.set_grad_enabled(training):
                out = site(leaf)
            if out is NotImplemented:
                continue  # it stays eager, and no hook of it sees a call
            self.num_replays += 1
            outputs, transient = as_tuple(out), chain.specs[index].transient
            flight = _Flight(
                index=index,
                leaf=leaf,
                outputs=[
                    it.detach().clone() if number in transient else it.detach()
                    for number, it in enumerate(outputs)
                ],
                begins=[get_gradient_edge(it) if it.requires_grad else None for it in outputs],
                before=before,
            )
            if training:
                self._flights.append(flight)
            else:
                after = self._rng.snapshot()
                self._compare(flight, self._named(flight.outputs), None)
                self._rng.restore(after)
            if index not in chain.shape.gaps:
                given = out
            del out, outputs  # nobody may hold one that is transient

    def _staged(self, index: int, given: Tensor) -> Tensor:
        is_entry = self._chain.shape.is_entry(index)
        return self._variant.staged(given, self._example.sources) if is_entry else given

    def _run_backwards(self) -> None:
        grad = self._example.grad
        while self._flights:
            before = self._compare_backward(self._flights.pop(), grad)
            grad = before if float(before.abs().max()) <= _LARGEST_GRADIENT else None

    def _compare_backward(self, flight: _Flight, of_first: Tensor | None) -> Tensor:
        """Returns the gradient of the site's input.

        Args:
            flight: of the site.
            of_first: the gradient of its first output, where it has as many rows or fewer.
        """
        differentiable = [
            output for output, begin in zip(flight.outputs, flight.begins, strict=True) if begin is not None
        ]
        grads = [_whole(of_first, differentiable[0]), *map(torch.ones_like, differentiable[1:])]
        kept = KeptGradients(self._chain.specs[flight.index])
        results, before = self._replay_backward(flight, grads, kept)
        self._compare(flight, results, _Backward(grads=grads, kept=kept))
        return before

    def _replay_backward(
        self, flight: _Flight, grads: Sequence[Tensor], kept: KeptGradients
    ) -> tuple[Results, Tensor]:
        """Copies of what the graph makes, and the gradient of its input."""
        results = _copies(self._named(flight.outputs))
        with kept.put_back_afterwards():
            torch.autograd.backward([begin for begin in flight.begins if begin is not None], grads)
            before = flight.leaf.grad
            assert before is not None
            return results | {_INPUT: self._in_valid_rows(before)} | _copies(kept.found()), before

    # -- the modules -----------------------------------------------------------------------------

    def _compare(self, flight: _Flight, graph: Results, backward: "_Backward | None") -> None:
        slot = self._chain.core.slot_index
        # A communicator's own threads keep tensors for a moment longer than the call.
        note = None if self._chain.holds_collectives else self._variant.notes[slot].get(flight.index)
        with self._backend.lend(self._chain.first_pool + slot, note) as lent:
            self._compare_runs(flight, graph, lambda: self._module_run(flight, backward, lent))

    def _compare_runs(self, flight: _Flight, graph: Results, run: _Run) -> None:
        with run() as eager:
            for name in sorted(graph.keys() ^ eager.keys()):  # made by one of them only
                self._add(flight, name, float("inf"), 0.0, False)
            both = [name for name in graph if name in eager]
            differing = [name for name in both if not have_same_bits(graph[name], eager[name])]
            ranges = {name: Range(eager[name]) for name in differing}
        del eager  # what is lent suffices for one run
        if not self._somewhere(bool(differing)):
            return

        def run_again(names: Sequence[str]) -> list[str]:
            with run() as eager:
                for name in names:
                    ranges[name].add(eager[name])
            return [name for name in names if not ranges[name].holds(graph[name])]

        unlike = differing
        for _ in range(_FURTHER_RUNS):
            unlike = run_again(differing)
        runs, is_reproducible = 1 + _FURTHER_RUNS, not any(ranges[name].spread for name in differing)
        while runs < _MOST_RUNS and self._somewhere(bool(unlike) and not is_reproducible):
            unlike, runs = run_again(unlike), runs + 1
        if len(unlike) < len(differing):
            self.within_spread.add(flight.index)
        for name in unlike:
            found, is_exact = ranges[name], torch.are_deterministic_algorithms_enabled()
            is_rounding = not is_exact and found.as_rounded(graph[name])
            self._add(flight, name, found.largest(graph[name]), found.spread, is_rounding)

    def _add(self, flight: _Flight, tensor: str, largest: float, spread: float, is_rounding: bool) -> None:
        slot, index, how = self._chain.core.slot_index, flight.index, {"is_rounding": is_rounding}
        found = Difference(slot=slot, index=index, tensor=tensor, largest=largest, spread=spread, **how)
        self.differences.append(found)

    @contextlib.contextmanager
    def _module_run(self, flight: _Flight, backward: "_Backward | None", lent: Lent) -> Iterator[Results]:
        """What the module makes of the graph's input, from the same random state; until the context ends."""
        site = self._chain.specs[flight.index]
        given = self._example.hidden if flight.index == 0 else flight.leaf
        leaf = given.detach().requires_grad_(backward is not None)
        self._rng.restore(flight.before)
        if backward is None:
            with lent(), torch.no_grad():
                outputs = as_tuple(site.call(self._staged(flight.index, leaf), **self._arguments))
            yield self._named(outputs)
            return
        swap = swap_of(site, training=True)
        with backward.kept.put_back_afterwards():
            with lent(), swapped(swap), torch.enable_grad():
                outputs = as_tuple(site.call(self._staged(flight.index, leaf), **self._arguments))
                self.most_bytes = max(self.most_bytes, self._bytes_now() - self._bytes_before)
                torch.autograd.backward([it for it in outputs if it.requires_grad], backward.grads)
            assert leaf.grad is not None
            given_back = {_INPUT: self._in_valid_rows(leaf.grad)}
            yield self._named(outputs) | given_back | backward.kept.found(swap)


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """What every backward pass of a site gets.

    Args:
        grads: of the outputs that have one.
        kept: the gradients of its parameters as they were.
    """

    grads: Sequence[Tensor]
    kept: KeptGradients


def _copies(results: Results) -> Results:
    return {name: result.clone() for name, result in results.items()}


def _output(number: int) -> str:
    return f"output {number}" if number else "output"


def _whole(grad: Tensor | None, output: Tensor) -> Tensor:
    """A gradient of all rows of an output, ones where there is none of its shape."""
    if grad is None or grad.shape[1:] != output.shape[1:] or grad.shape[0] > output.shape[0]:
        return torch.ones_like(output)
    whole = torch.zeros_like(output)
    whole[: grad.shape[0]] = grad
    return whole
