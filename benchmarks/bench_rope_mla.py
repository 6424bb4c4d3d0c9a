# SPDX-License-Identifier: Apache-2.0
"""RoPE of multi-latent attention against a device copy of as many bytes, and against Megatron's kernels.

Queries, keys and values in one launch, as `bench_rope` times it. Bytes are those that the work has to read
and write, without tables. Of the rival only the kernels count, two of them a direction.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer, tell, told, try_part
from benchmarks.measuring.clocks import copy_of, device_us, kernel_us
from benchmarks.measuring.figures import Measurement, beside, timed_ratio
from benchmarks.measuring.results import Figure
from benchmarks.subjects.packs import lognormal_offsets
from megagraph import _C as _C  # registers torch.ops.megagraph

DEVICE = "cuda"
CONTENT, ROTARY, VALUE = 128, 64, 128  # DeepSeek's heads
HEADS, MIB = (16, 128), (64, 256, 1024)
BAR = 0.85  # of a copy's bandwidth
RIVAL_SECONDS = 120  # imports and a compilation among them
DIRECTIONS = ("forward", "backward")
MEGATRON = "Megatron's fused kernels, kernels only"


@dataclass(frozen=True)
class Inputs:
    """A pack of some heads."""

    heads: int
    mib: int  # that the forward reads and writes together, at least, in MiB

    def __str__(self) -> str:
        return f"{self.heads} heads, {self.tokens} tokens"

    @property
    def tokens(self) -> int:
        """Rows; a multiple of 16."""
        return -(-(self.mib << 20) // self._row_bytes("forward") // 16) * 16

    def _row_bytes(self, direction: str) -> int:
        of_queries = ROTARY if direction == "forward" else CONTENT + ROTARY  # forward in place
        of_keys = 2 * (CONTENT + VALUE) + ROTARY
        return 2 * (self.heads * (2 * of_queries + of_keys) + ROTARY)

    def num_bytes(self, direction: str) -> int:
        """What a direction has to read and write."""
        return self.tokens * self._row_bytes(direction)

    def offsets(self) -> Tensor:
        """About a document for each 1,024 rows, which fill the pack."""
        return lognormal_offsets(self.tokens, device=DEVICE)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Of each position of the longest document, [positions, 64]."""
        positions = torch.arange(int(self.offsets().diff().max()), device=DEVICE, dtype=torch.float32)
        inverse = 10_000.0 ** (-torch.arange(0, ROTARY, 2, device=DEVICE) / ROTARY)
        angles = torch.outer(positions, inverse).repeat(1, 2)
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def random(self, heads: int, *dims: int) -> list[Tensor]:
        """One tensor for each dimension, [T, heads, dim]."""
        return [torch.randn(self.tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16) for dim in dims]

    def given(self) -> list[Tensor]:
        """Queries, keys without a position with their values, and rotary keys."""
        return [*self.random(self.heads, CONTENT + ROTARY, CONTENT + VALUE), *self.random(1, ROTARY)]

    def grads(self) -> list[Tensor]:
        """Of queries, keys and values."""
        return self.random(self.heads, CONTENT + ROTARY, CONTENT + ROTARY, VALUE)


def measure(measurement: Measurement) -> None:
    """Measures every size, beside Megatron's kernels."""
    answer = try_part(__name__, timeout=RIVAL_SECONDS)
    for heads, mib in itertools.product(HEADS, MIB):
        inputs = Inputs(heads, mib)
        measurement.take(str(inputs), partial(_figures_of, inputs, answer))


def _figures_of(inputs: Inputs, answer: Answer) -> list[Figure]:
    figures: list[Figure] = []
    how = (*inputs.tables(), inputs.offsets())
    calls: dict[str, Callable[[], object]] = {
        "forward": partial(torch.ops.megagraph.rope_mla_, *inputs.given(), *how, v_dim=VALUE, fused=True),
        "backward": partial(torch.ops.megagraph.rope_mla_backward, *inputs.grads(), *how, fused=True),
    }
    for direction, cold in itertools.product(DIRECTIONS, (False, True)):
        copying = copy_of(inputs.num_bytes(direction) // 2)  # read once and written once
        ours, copy = device_us((calls[direction], copying), cold=cold)
        name = f"{inputs}, {direction}, {'cold' if cold else 'warm'}: share of a copy's bandwidth"
        figure = timed_ratio(name, copy, ours, "share", bar=BAR, better="higher", floor=1.0)
        if not cold:
            theirs = told(answer, _key(inputs, direction))
            figure = beside(figure, MEGATRON, theirs, partial(_share_of, median(copy)))
        figures.append(figure)
    return figures


def _share_of(copy_us: float, answer: Answer) -> float:
    return copy_us / float(answer["us"])


def _key(inputs: Inputs, direction: str) -> str:
    return f"{inputs}; {direction}"


def answer() -> None:
    """Tells of Megatron's kernels at every size."""
    for heads, mib in itertools.product(HEADS, MIB):
        _tell(Inputs(heads, mib))


def _tell(inputs: Inputs) -> None:
    from megatron.core.fusions import fused_mla_yarn_rope_apply as theirs

    leaves = [t.requires_grad_() for t in inputs.given()]
    q, kv, k_pe = leaves
    tables, cu_seqlens, grads = [t[:, None, None] for t in inputs.tables()], inputs.offsets(), inputs.grads()
    made: list[Tensor] = []

    def rotate() -> list[Tensor]:
        query = theirs.fused_apply_mla_rope_for_q(q, *tables, CONTENT, ROTARY, cu_seqlens)
        keys = theirs.fused_apply_mla_rope_for_kv(kv, k_pe, *tables, ROTARY, CONTENT, VALUE, cu_seqlens)
        return [query, *keys]

    def forward() -> float:
        made[:] = rotate()
        return kernel_us(rotate)

    def backward() -> float:
        if not made:
            raise RuntimeError("its forward failed")
        return kernel_us(lambda: torch.autograd.grad(made, leaves, grads, retain_graph=True))

    tell(_key(inputs, "forward"), forward)
    tell(_key(inputs, "backward"), backward)
