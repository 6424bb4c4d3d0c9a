# SPDX-License-Identifier: Apache-2.0
"""Where autograd meets a site that is warmed up or captured.

The static tensors between the sites of one variant and slot (which of them is which, and from when on their
memory serves others: Note [Capture plan] in megagraph/bank/capture.py); our gradient accumulators in place of
torch's (csrc/bank/capture/main_grad_node.h, Note [Accumulator swap]); and what of a call's input and output
its backward pass reads, where they lie: nobody would notice that a graph's were written meanwhile, as
autograd does by the tensors that eager saves.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import Backend
from megagraph.bank.restore import main_grad_of, unfilled
from megagraph.bank.sites import SiteSpec, StepOrder

__all__ = ["Edges", "SavedTensors", "Saves", "saved_tensors", "swap_of", "swapped"]


def _already_added(param: Tensor) -> Callable[[], bool] | None:
    """Asks, at the gradient's turn, whether a layer with fused accumulation has added it itself."""
    if main_grad_of(param) is None or not hasattr(param, "grad_added_to_main_grad"):
        return None
    return lambda: bool(param.grad_added_to_main_grad) and not getattr(param, "zero_out_wgrad", False)


def swap_of(
    site: SiteSpec, training: bool, reached: dict[nn.Parameter, None] | None = None
) -> _C.AccumulatorSwap:
    """Accumulators of ours; `reached` takes the parameters in the order of their gradients."""
    params = site.trainable() if training else []

    def asked(param: nn.Parameter) -> Callable[[], bool] | None:
        check = _already_added(param)
        if reached is None:
            return check

        def note() -> bool:
            reached.setdefault(param)
            return check is not None and check()

        return note

    return _C.AccumulatorSwap([(param, main_grad_of(param), asked(param)) for param in params])


@contextlib.contextmanager
def swapped(swap: _C.AccumulatorSwap) -> Iterator[None]:
    """Puts ours in their place for a while."""
    swap.install()
    try:
        yield
        swap.join()
    finally:
        swap.restore()


class Saves(NamedTuple):
    """Whether a backward pass reads the call's input, and each of its outputs."""

    input: bool
    outputs: tuple[bool, ...]


class SavedTensors:
    """The memory of what autograd saved."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def note(self, tensor: Tensor) -> Tensor:
        """Takes note of a tensor that is being saved, and hands it on."""
        if tensor.layout is torch.strided:
            self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def of(self, given: Tensor, outputs: Sequence[Tensor]) -> Saves:
        """What of a call was saved."""
        return Saves(self._has(given), tuple(map(self._has, outputs)))

    def _has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages


@contextlib.contextmanager
def saved_tensors() -> Iterator[SavedTensors]:
    """Notes what autograd saves inside."""
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved


class Edges:
    """Boundaries of every site of a plan, by index.

    Args:
        sites: of the plan.
        order: of all steps.
        backend: keeps them.
    """

    def __init__(self, sites: Mapping[int, SiteSpec], order: StepOrder, backend: Backend) -> None:
        self._sites = sites
        self._order = order
        self._backend = backend
        self._of = {index: _C.Boundaries() for index in sites}

    def __getitem__(self, index: int) -> _C.Boundaries:
        return self._of[index]

    def _before(self, index: int) -> _C.Boundaries | None:
        """Of the site whose output a site takes where it lies."""
        return self._of.get(index - 1) if self._order.joins(index) else None

    def _after(self, index: int) -> _C.Boundaries | None:
        return self._of.get(index + 1) if self._order.joins(index + 1) else None

    def is_chained(self, index: int) -> bool:
        """Whether a site's input is the output of the one before it."""
        return self._before(index) is not None

    def is_transient(self, index: int) -> list[bool]:
        """Of each output of a site: whether later passes use its memory."""
        return [number in self._sites[index].transient for number in range(len(self._of[index].outputs))]

    # -- inside of a pass ------------------------------------------------------------------------

    def input(self, index: int, empty: Callable[[], Tensor]) -> Tensor:
        """A site's input.

        Args:
            index: the site.
            empty: makes one, where no site before it does.
        """
        edges = self._of[index]
        if not edges.inputs:
            before = self._before(index)
            edges.inputs = [empty()] if before is None else before.outputs
        return edges.inputs[0]

    def keep_outputs(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Makes them a site's outputs."""
        edges = self._of[index]
        edges.outputs = self._keep_all(edges.outputs, outputs)

    def output_grads(self, index: int, has_grad: Iterable[bool]) -> Sequence[Tensor | None]:
        """The gradients of a site's outputs, of those that have one."""
        edges = self._of[index]
        if not edges.grad_outputs:
            after = self._after(index)
            with unfilled():
                made = [
                    torch.empty_like(output) if has else None
                    for output, has in zip(edges.outputs, has_grad, strict=True)
                    if after is None
                ]
            edges.grad_outputs = made if after is None else after.grad_inputs
        return edges.grad_outputs

    def keep_input_grad(self, index: int, grad: Tensor) -> Tensor:
        """Makes it the gradient of a site's input; returns where that lies."""
        edges = self._of[index]
        edges.grad_inputs = kept = self._keep_all(edges.grad_inputs, [grad])
        return kept[0]

    def keep_param_grads(self, index: int, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Makes them the gradients of a site's parameters without main_grad."""
        edges = self._of[index]
        edges.params = [*grads]
        edges.param_grads = self._keep_all(edges.param_grads, [*grads.values()])

    def _keep_all(self, kept: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
        """Makes values the content of static buffers, those of an earlier run where there was one."""
        buffers = kept or [None] * len(values)
        return [self._backend.keep(buffer, value) for buffer, value in zip(buffers, values, strict=True)]

    # -- after a pass ----------------------------------------------------------------------------

    def give_back_outputs(self, index: int) -> None:
        """After a site's forward: returns memory to the pool that others use from now on."""
        edges, transient = self._of[index], self._sites[index].transient
        edges.outputs = [
            self._backend.boundary(output) if number in transient else output
            for number, output in enumerate(edges.outputs)
        ]

    def give_back_gradients(self, index: int) -> None:
        """After a site's backward: the same of gradients that cross a gap."""
        edges = self._of[index]
        if self._after(index) is None:
            edges.grad_outputs = self._boundaries(edges.grad_outputs)
        if not self._order.is_entry(index) and self._before(index) is None:
            edges.grad_inputs = self._boundaries(edges.grad_inputs)

    def _boundaries(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [None if tensor is None else self._backend.boundary(tensor) for tensor in tensors]

    def disown(self) -> None:
        """After the last pass: the slot's pool owns all of it, and the nesting rule guards it."""
        seen: dict[Any, Tensor] = {}

        def alias(tensor: Tensor) -> Tensor:
            key = tensor.data_ptr(), tensor.shape, tensor.dtype  # gaps let other tensors lie at one address
            return seen.setdefault(key, self._backend.boundary(tensor))

        def aliases(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
            return [None if tensor is None else alias(tensor) for tensor in tensors]

        for edges in self._of.values():
            edges.inputs, edges.outputs = [*map(alias, edges.inputs)], [*map(alias, edges.outputs)]
            edges.param_grads = [*map(alias, edges.param_grads)]
            edges.grad_outputs = aliases(edges.grad_outputs) or [None] * len(edges.outputs)
            edges.grad_inputs = aliases(edges.grad_inputs) or [None] * len(edges.inputs)
