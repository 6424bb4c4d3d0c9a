# SPDX-License-Identifier: Apache-2.0
"""Compares the graphs of a variant with the modules that they stand for, bit by bit, on a real micro-batch.

Note [Verification]
A graph may have baked in what nobody watches. So before it is used, a micro-batch runs both ways, site by
site: the graph of a site and its module get the same input, the same gradient, and the same random state.
Thus a difference is that of one site, and not of those before it. Forwards replay in order, so that every
boundary lies where it will lie. What stays eager is passed over: the next site takes the same input. Then,
from the last site to the first, the module runs forward and backward after the graph's backward. It runs in
memory of a single slot's pool, that which later sites and this one need no more (csrc/torch/pool_loan.h, Note
[Lent memory]), else in its own; beside it lie copies of what the graph made, among it the gradients of one
site. What a call writes into buffers, further state and plain attributes is compared as well; each call
begins with these as they were.

Afterwards gradients, buffers, random states and counters are as they were. Where a module differs from itself
(it adds with atomics), it runs several times more, and its graph has to be a run like these
(csrc/bank/verify/runs.h, Note [A run like others]). Where differences are rare and of several sizes that is
no bound, so that a graph which lies further off has to do so in four verifications; so has one in which
roundings of few entries differ and no more, unless torch is asked for deterministic algorithms.

A site that has a graph and does not take the micro-batch, on any rank, is not verified; `not_run` says which,
and why. Ranks tell each other how each run went, of a graph or a module: if one of them fails, all give the
verification up. One that runs out of memory tells nobody, as others may wait for it in a module's collective:
that error ends the job, as in eager.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megagraph._C import Comparison, Difference, Finish, KeptState
from megagraph.bank.backends import Lent
from megagraph.bank.bank import Bank
from megagraph.bank.capture import GAVE_UP, GroupGaveUp, finish_backward, gradient_edge, swap_of
from megagraph.bank.restore import KeptGradients, Results, written_by
from megagraph.bank.rng import Snapshot
from megagraph.bank.sites import as_tuple
from megagraph.reasons import EagerReason

__all__ = ["Difference", "Example", "Verification", "verify"]

# Of what a site gets: gradients that pass over gaps may grow from site to site beyond what types hold.
_LARGEST_GRADIENT = 2.0**10
_INPUT = "gradient of the input"


@dataclass(kw_only=True)
class Example:
    """A micro-batch of a variant."""

    hidden: Tensor  # the first site's input
    sources: Sequence[Tensor] = ()  # metadata as the variant's `MetadataSpec`s name it
    grad: Tensor | None = None  # of the last output, of as many rows or fewer; None for ones
    # Indices, on the bank's device, of the rows that anybody reads; None for all. Kernels may leave in
    # padding whatever the memory held.
    valid_rows: Tensor | None = None


@dataclass(kw_only=True)
class _Flight:
    """One site between its forward and its backward."""

    index: int
    leaf: Tensor  # what the graph was given
    outputs: Sequence[Tensor]  # copies of those whose memory later passes use
    written: Results  # what the forward has left beside gradients
    begins: Sequence[GradientEdge | None]  # where the backward of each output begins
    before: Snapshot
    finish: Finish | None  # what the graph's backward leaves
    # What every backward pass gets: gradients of the outputs that have one, and those of its parameters as
    # they were; None without a backward.
    grads: Sequence[Tensor] = ()
    kept: KeptGradients | None = None


class Verification:
    """Compares one captured variant with its modules."""

    def __init__(self, bank: Bank, key: Any, example: Example) -> None:
        self._bank, self._key, self._example = bank, key, example
        self._variant, self._somewhere = bank.captured[bank.variants[key]], bank.options.somewhere
        self._flights: list[_Flight] = []
        self.differences: list[Difference] = []  # of graphs and modules
        # Sites that differ from themselves; their graphs lie within that.
        self.within_spread: set[int] = set()
        self.not_run: dict[int, str] = {}  # sites whose graphs did not take the micro-batch, and why
        self.most_bytes = 0  # on the device beside the graphs' own, where that can be told

    def run(self) -> None:
        """Runs the micro-batch both ways, in each slot; `differences` says what came out. Counts no calls."""
        bank, counters = self._bank, self._bank.counters()
        bank.set_in_step(False)
        try:
            # In this thread, as replays are: what is lent has room for no other thread's workspaces.
            alone = KeptGradients(bank.specs, work_runs=False).put_back_afterwards()
            with bank.backend.recording(), torch.autograd.set_multithreading_enabled(False), alone:
                for _slot in range(bank.num_slots):  # which take turns
                    self._run_slot()
        finally:
            bank.set_in_step(True)
            bank.take_unfinished()  # an error came before
            bank.set_counters(counters)
            bank.backend.settle()  # no later work on this stream would take that memory

    def _run_slot(self) -> None:
        start = self._bank.rng.snapshot()
        self._bytes_before = self._bytes_now()
        metadata = [buffer for of_slot in self._variant.buffers for buffer in of_slot.values()]
        # With the counters among the metadata.
        self._state = KeptState([*map(written_by, self._bank.specs)], metadata)
        try:
            with (
                self._variant.spec.context(),
                self._bank.micro_batch(self._key, self._example.sources) as reason,
            ):
                # Where one rank does not run it, the others would wait in the first graph.
                if self._somewhere(reason is not None):
                    why = "on another rank" if reason is None else reason.name
                    raise RuntimeError(f"variant {self._key} runs eager ({why}) and cannot be verified")
                self._run_forwards()
                self._run_backwards()
        finally:
            self._flights.clear()
            try:
                self._state.put_all_back()
            finally:
                del self._state
                self._bank.rng.restore(start)

    def recurs(self, times: int) -> bool:
        """Runs once more if anything, on any rank, may be chance after `times` times; forgets what was."""
        doubtful = [found for found in self.differences if found.may_be_chance(times)]
        if not self._somewhere(bool(doubtful)):
            return False
        again = Verification(self._bank, self._key, self._example)
        again.run()
        places = {found.place for found in again.differences}
        chance = [found for found in doubtful if found.place not in places]
        self.within_spread |= {found.index for found in chance}
        self.differences = [found for found in self.differences if found not in chance]
        return True

    def _in_valid_rows(self, output: Tensor) -> Tensor:
        valid, counts = self._example.valid_rows, (self._variant.spec.rows, self._example.hidden.shape[0])
        return output if valid is None or output.shape[0] not in counts else output.index_select(0, valid)

    def _bytes_now(self) -> int:
        device = self._example.hidden.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    def _named(self, outputs: Sequence[Tensor]) -> Results:
        """The outputs of a site, by what they are in words."""
        rows = [self._in_valid_rows(it.detach()) for it in outputs]
        return {f"output {number}" if number else "output": it for number, it in enumerate(rows)}

    # -- the graphs ------------------------------------------------------------------------------

    def _run_forwards(self) -> None:
        bank, training = self._bank, self._variant.spec.training
        self._arguments = self._variant.arguments(bank.slot_index, self._example.sources)
        # A site behind something eager takes as many rows as were captured; the first one stages itself.
        given = self._variant.staged(self._example.hidden, self._example.sources)
        for index, site in enumerate(bank.sites):
            if index not in self._variant.sites:
                continue
            before, counts = self._bank.rng.snapshot(), self._bank.counters()
            leaf = (self._example.hidden if bank.is_entry(index) else given).detach().requires_grad_(training)
            with torch.set_grad_enabled(training):
                out = site(leaf)
            is_refused = out is NotImplemented
            # Where one rank does not run a site, the others would wait in its module.
            if self._somewhere(is_refused):
                now = bank.counters()
                counted = (name for name in EagerReason.__members__ if now[name] > counts[name])
                self.not_run[index] = next(counted, "") if is_refused else "on another rank"
                self._state.put(index)
                del out
                continue
            outputs, transient = as_tuple(out), bank.specs[index].transient
            kept = [it.detach() for it in outputs]
            flight = _Flight(
                index=index,
                leaf=leaf,
                outputs=[it.clone() if number in transient else it for number, it in enumerate(kept)],
                written=self._state.now(index),
                begins=[*map(gradient_edge, outputs)],
                before=before,
                finish=bank.take_finish(),
            )
            self._state.put(index)
            if training:
                self._flights.append(flight)
            else:
                after = self._bank.rng.snapshot()
                self._compare(flight, self._named(flight.outputs) | flight.written)
                self._bank.rng.restore(after)
            if index not in bank.gaps:
                given = out
            del out, outputs, kept  # nobody may hold one that is transient

    def _run_backwards(self) -> None:
        grad = self._example.grad
        while self._flights:
            before = self._compare_backward(self._flights.pop(), grad)
            grad = before if float(before.abs().max()) <= _LARGEST_GRADIENT else None

    def _compare_backward(self, flight: _Flight, of_first: Tensor | None) -> Tensor:
        """Gives the gradient of a site's input; `of_first` is that of its first output, or of fewer rows."""
        differentiable = [
            output for output, begin in zip(flight.outputs, flight.begins, strict=True) if begin is not None
        ]
        flight.grads = [_whole(of_first, differentiable[0]), *map(torch.ones_like, differentiable[1:])]
        flight.kept = kept = KeptGradients([self._bank.specs[flight.index]])
        results, state, index = _copies(self._named(flight.outputs)), self._state, flight.index
        state.put(index, flight.written)
        with kept.put_back_afterwards():
            torch.autograd.backward([begin for begin in flight.begins if begin is not None], flight.grads)
            if flight.finish is not None:
                flight.finish()
            before = flight.leaf.grad
            assert before is not None
            results |= {_INPUT: self._in_valid_rows(before)} | _copies(kept.found()) | state.now(index)
        state.put(index)
        self._compare(flight, results)
        return before

    # -- the modules -----------------------------------------------------------------------------

    def _compare(self, flight: _Flight, graph: Results) -> None:
        # A communicator's own threads keep tensors for a moment longer than the call.
        has_threads, slot = self._bank.options.run_eager_alike is not None, self._bank.slot_index
        note = None if has_threads else self._variant.notes[slot].get(flight.index)
        with self._bank.backend.lend(slot, note) as lent:
            with self._module_run(flight, lent) as eager:
                comparison = Comparison(graph, eager)
            del eager  # what is lent suffices for one run
            while self._somewhere(comparison.is_open()):
                with self._module_run(flight, lent) as eager:
                    comparison.add(eager)
                del eager
        if comparison.lies_within():
            self.within_spread.add(flight.index)
        self.differences += comparison.differences(slot, flight.index)

    @contextlib.contextmanager
    def _module_run(self, flight: _Flight, lent: Lent) -> Iterator[Results]:
        """What the module makes of the graph's input, from the same random state; until the context ends."""
        site, kept = self._bank.specs[flight.index], flight.kept
        has_backward = kept is not None
        leaf, swap = flight.leaf.detach().requires_grad_(has_backward), swap_of(site, has_backward)
        self._bank.rng.restore(flight.before)
        self._somewhere(False)  # a rank that got no further enters no collective
        try:
            with contextlib.nullcontext() if kept is None else kept.put_back_afterwards():
                with lent(), swap, torch.set_grad_enabled(has_backward):
                    is_entry = self._bank.is_entry(flight.index)
                    given = self._variant.staged(leaf, self._example.sources) if is_entry else leaf
                    outputs = as_tuple(site.call(given, **self._arguments))
                    if has_backward:
                        self.most_bytes = max(self.most_bytes, self._bytes_now() - self._bytes_before)
                        torch.autograd.backward([it for it in outputs if it.requires_grad], flight.grads)
                        finish_backward(site, swap, self._bank.options)
                made = self._named(outputs) | self._state.found(flight.index)
                if kept is not None:
                    assert leaf.grad is not None
                    made |= {_INPUT: self._in_valid_rows(leaf.grad)} | kept.found(swap)
                yield made
        finally:
            self._state.put(flight.index)


def verify(bank: Bank, key: Any, example: Example) -> Verification:
    """Compares a variant's graphs, of each slot, with its modules on a real micro-batch; counts no calls.

    Call it between steps only, with every slot free. Everything is as it was afterwards. Where a module keeps
    memory of its call, over which graphs would write, that is a `KeptMemoryError`. What fails on another rank
    is a `GroupGaveUp`.
    """
    verification, times = Verification(bank, key, example), 0
    try:
        verification.run()
        while verification.recurs(times):
            times += 1
    except Exception as error:
        if not isinstance(error, GroupGaveUp | torch.OutOfMemoryError):
            bank.options.max_over_ranks([GAVE_UP])
        raise
    return verification


def _copies(results: Results) -> Results:
    return {name: result.clone() for name, result in results.items()}


def _whole(grad: Tensor | None, output: Tensor) -> Tensor:
    """A gradient of all rows of an output, ones where there is none of its shape."""
    if grad is None or grad.shape[1:] != output.shape[1:] or grad.shape[0] > output.shape[0]:
        return torch.ones_like(output)
    whole = torch.zeros_like(output)
    whole[: grad.shape[0]] = grad
    return whole
