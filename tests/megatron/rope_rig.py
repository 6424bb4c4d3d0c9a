# SPDX-License-Identifier: Apache-2.0
"""Packs by what they declare, and runs of the plugin's three modes on them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron_rig import CAPACITY, OPTIONS, Micro, Run, assert_same, graph_config, report_of, step, weights
from torch import Tensor

import megagraph
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer

MODES = ("off", "eager", "graph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared(Micro):
    """A pack that says of itself what a host says, not what its documents are.

    Args:
        max_seqlen: what it declares; at least the longest document.
        num_seqs: document slots of its offsets, empty ones included; None for its documents alone.
        aliased: its padded offsets are the actual ones.
    """

    max_seqlen: int
    num_seqs: int | None = None
    aliased: bool = False

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        missing = 0 if self.num_seqs is None else self.num_seqs - len(self.lengths)
        offsets: Tensor = torch.cat([params.cu_seqlens_q, params.cu_seqlens_q[-1:].expand(missing)])
        params.cu_seqlens_q = params.cu_seqlens_kv = offsets
        if self.aliased:
            params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = offsets
        params.max_seqlen_q = params.max_seqlen_kv = self.max_seqlen
        return params


def canonical(lengths: Sequence[int], *, capacity: Capacity = CAPACITY, **further: Any) -> Declared:
    """A pack of 64 tokens that is canonical already: the capacity's rows, offsets and longest document."""
    assert sum(lengths) == capacity.tokens
    return Declared(
        lengths=tuple(lengths), max_seqlen=capacity.max_seqlen, num_seqs=capacity.num_seqs, **further
    )


def run(
    mode: str,
    steps: Sequence[Sequence[Micro]],
    make: Callable[[], Trainer] = lambda: Trainer(OPTIONS),
    **changes: Any,
) -> Run:
    """Trains a fresh model; `off` patches nothing.

    Args:
        mode: the plugin's.
        steps: the micro-batches of each step.
        make: makes the model, the same one each time.
        changes: of the plugin's options.
    """
    left = Run()
    megagraph.install(graph_config(mode=mode, **changes))
    try:
        trainer = make()
        left.steps = [step(trainer, micros) for micros in steps]
        left.weights = weights(trainer.chunk)
        if mode != "off":
            left.report = report_of(trainer)
    finally:
        megagraph.uninstall()
    return left


def assert_same_bits(one: Run, other: Run) -> None:
    """Every loss, gradient and weight."""
    for index, (left, right) in enumerate(zip(one.steps, other.steps, strict=True)):
        assert_same(left, right, f"step {index}:")
    bad = [name for name, weight in one.weights.items() if not torch.equal(weight, other.weights[name])]
    assert not bad, f"weights at the end: {bad}"


def three_modes(
    steps: Sequence[Sequence[Micro]], make: Callable[[], Trainer] = lambda: Trainer(OPTIONS), **changes: Any
) -> dict[str, Run]:
    """The same run in each mode, all of the same bits."""
    runs = {mode: run(mode, steps, make, **changes) for mode in MODES}
    for mode in MODES[1:]:
        assert_same_bits(runs["off"], runs[mode])
    return runs
