# SPDX-License-Identifier: Apache-2.0
"""Compares the graphs of a variant with the modules that they stand for, bit by bit, on a real micro-batch.

Note [Verification]
A graph may have baked in what nobody watches. So before it is used, a micro-batch runs both ways, site by
site: the graph of a site and its module get the same input, the same gradient, and the same random state.
Thus a difference is that of one site, and not of those before it. Forwards replay in order, so that every
boundary lies where it will lie. What stays eager is passed over: the next site takes the same input. Then,
from the last site to the first, the module runs forward and backward beside the graph's backward. Memory is
needed for the activations of one module, and for copies of its gradients, beside the graphs' own.

Afterwards gradients, buffers, random states and counters are as they were. Where a module differs from itself
(it adds with atomics), it runs several times more, and its graph has to lie within twice what these differ
by: it is one run more, and may well be the one that lies furthest from another.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megagraph import _C
from megagraph.bank.accumulators import swap_of, swapped
from megagraph.bank.bits import Results, have_same_bits, is_within, largest, spread
from megagraph.bank.chain import CapturedVariant, Chain
from megagraph.bank.restore import main_grad_of
from megagraph.bank.rng import RngSources, Snapshot
from megagraph.bank.sites import SiteSpec, as_tuple
from megagraph.decide.reasons import EagerReason

__all__ = ["Difference", "Example", "Verification"]

# Of a module that may differ from itself; up to as many in all where it does, but not yet in some tensor in
# which its graph does.
_FURTHER_RUNS, _MOST_RUNS = 4, 20


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
class Difference:
    """A tensor of a site that its graph and its module make differently.

    Args:
        index: the site.
        tensor: what differs, in words.
        largest: between the graph and the module, over all entries.
        spread: between runs of the module.
    """

    index: int
    tensor: str
    largest: float
    spread: float

    def __str__(self) -> str:
        own = f", and it differs from itself by up to {self.spread:.3g}" if self.spread else ""
        return f"{self.tensor} differs from eager by up to {self.largest:.3g}{own}"


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """One site between its forward and its backward."""

    index: int
    leaf: Tensor  # what the graph was given
    outputs: Sequence[Tensor]  # copies of those whose memory later passes use
    begins: Sequence[GradientEdge | None]  # where the backward of each output begins
    before: Snapshot


def _of(results: Results, names: Sequence[str]) -> Results:
    return {name: results[name] for name in names}


class Verification:
    """Compares one captured variant with its modules.

    Args:
        chain: with no micro-batch running.
        key: the variant.
        rng: restored afterwards.
        example: what runs.
    """

    def __init__(self, chain: Chain, key: Any, rng: RngSources, example: Example) -> None:
        self._chain = chain
        self._key = key
        self._rng = rng
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

    def _in_valid_rows(self, output: Tensor) -> Tensor:
        valid, counts = self._example.valid_rows, (self._variant.spec.rows, self._example.hidden.shape[0])
        return output if valid is None or output.shape[0] not in counts else output.index_select(0, valid)

    def _bytes_now(self) -> int:
        device = self._example.hidden.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

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
        for flight in reversed(self._flights):
            grad = self._compare_backward(flight, grad)

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
        results, before = self._replay_backward(flight, grads)
        self._compare(flight, results, grads)
        return before

    def _replay_backward(self, flight: _Flight, grads: Sequence[Tensor]) -> tuple[Results, Tensor]:
        """What the graph makes, and the gradient of its input. Gradients are as they were afterwards."""
        results = {name: output.clone() for name, output in self._named(flight.outputs).items()}
        with _Gradients(self._chain.specs[flight.index]).put_back_afterwards() as held:
            torch.autograd.backward([begin for begin in flight.begins if begin is not None], grads)
            assert flight.leaf.grad is not None
            before = flight.leaf.grad.clone()
            results["gradient of the input"] = self._in_valid_rows(before)
            return results | held.found(), before

    # -- the modules -----------------------------------------------------------------------------

    def _compare(self, flight: _Flight, graph: Results, grads: Sequence[Tensor] | None) -> None:
        eager = self._run_module(flight, grads)
        differing = [name for name in graph if not have_same_bits(graph[name], eager[name])]
        if not differing:
            return
        runs = [_of(eager, differing)]
        runs += [_of(self._run_module(flight, grads), differing) for _ in range(_FURTHER_RUNS)]
        unlike = [name for name in differing if not is_within(graph, runs, name)]
        is_reproducible = not any(spread(runs, name) for name in differing)
        while unlike and not is_reproducible and len(runs) < _MOST_RUNS:
            runs.append(_of(self._run_module(flight, grads), unlike))
            unlike = [name for name in unlike if not is_within(graph, runs, name)]
        if len(unlike) < len(differing):
            self.within_spread.add(flight.index)
        for name in unlike:
            found = Difference(
                index=flight.index,
                tensor=name,
                largest=largest(graph, runs, name),
                spread=spread(runs, name),
            )
            self.differences.append(found)

    def _run_module(self, flight: _Flight, grads: Sequence[Tensor] | None) -> Results:
        """What the module makes of the graph's input, from the same random state."""
        site = self._chain.specs[flight.index]
        given = self._example.hidden if flight.index == 0 else flight.leaf
        leaf = given.detach().requires_grad_(grads is not None)
        self._rng.restore(flight.before)
        if grads is None:
            with torch.no_grad():
                outputs = as_tuple(site.call(self._staged(flight.index, leaf), **self._arguments))
            return self._named(outputs)
        swap = swap_of(site, training=True)
        with _Gradients(site).put_back_afterwards() as held:
            with swapped(swap), torch.enable_grad():
                outputs = as_tuple(site.call(self._staged(flight.index, leaf), **self._arguments))
                self.most_bytes = max(self.most_bytes, self._bytes_now() - self._bytes_before)
                torch.autograd.backward([output for output in outputs if output.requires_grad], grads)
            assert leaf.grad is not None
            given_back = {"gradient of the input": self._in_valid_rows(leaf.grad)}
            return self._named(outputs) | given_back | held.found(swap)


class _Gradients:
    """The gradients of a site's parameters: as they were, and what a backward pass has made of them.

    Args:
        site: whose parameters.
    """

    def __init__(self, site: SiteSpec) -> None:
        self._params = {name: param for name, param in site.named_parameters() if param.requires_grad}
        main_grads = {name: main_grad_of(param) for name, param in self._params.items()}
        self._main = {name: grad for name, grad in main_grads.items() if grad is not None}
        self._before = {name: grad.clone() for name, grad in self._main.items()}
        self._flags = [
            (param, param.grad_added_to_main_grad)
            for param in self._params.values()
            if hasattr(param, "grad_added_to_main_grad")
        ]
        self._grads = [(param, param.grad) for param in self._params.values()]
        for param in self._params.values():
            param.grad = None

    def found(self, swap: _C.AccumulatorSwap | None = None) -> Results:
        """Copies, by what they are in words.

        Args:
            swap: the accumulators of the backward pass; None for autograd's own.
        """
        results = {f"gradient of {name}": grad.clone() for name, grad in self._main.items()}
        others = {name: param for name, param in self._params.items() if name not in self._main}
        kept = [param.grad for param in others.values()] if swap is None else swap.take_kept_grads()
        for name, grad in zip(others, kept, strict=True):
            if grad is not None:
                results[f"gradient of {name}"] = grad.clone()
        return results

    @contextlib.contextmanager
    def put_back_afterwards(self) -> Iterator["_Gradients"]:
        """Leaves everything as it was, whatever happens inside."""
        try:
            yield self
        finally:
            with torch.no_grad():
                for name, main_grad in self._main.items():
                    main_grad.copy_(self._before[name])
            for param, grad in self._grads:
                param.grad = grad
            for param, flag in self._flags:
                _set_flag(param, flag)


def _output(number: int) -> str:
    return f"output {number}" if number else "output"


def _whole(grad: Tensor | None, output: Tensor) -> Tensor:
    """A gradient of all rows of an output, ones where there is none of its shape."""
    if grad is None or grad.shape[1:] != output.shape[1:] or grad.shape[0] > output.shape[0]:
        return torch.ones_like(output)
    whole = torch.zeros_like(output)
    whole[: grad.shape[0]] = grad
    return whole


def _set_flag(param: nn.Parameter, flag: Any) -> None:
    param.grad_added_to_main_grad = flag  # type: ignore[attr-defined]
