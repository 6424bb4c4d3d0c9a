# SPDX-License-Identifier: Apache-2.0
"""`rope_thd` against a device copy of the same bytes, and against other ways to rotate a pack.

Ours and the copy are timed alike, in turns, between events. A rival counts the time of its kernels only,
without the gaps between them: its host may be slower than the GPU.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.compare import Answer, against_each
from benchmarks.measuring.publish import Measurement
from benchmarks.measuring.run_children import collect, tell
from benchmarks.measuring.time_calls import copy_of, device_us_in_turns
from benchmarks.measuring.time_kernels import kernel_us
from benchmarks.packs.documents import lognormal_offsets
from megagraph import results
from megagraph.packs import ops

DEVICE = "cuda"
HEAD_DIM = 128
SMALL_MIB, LARGE_MIB = (8, 16, 32), (64, 160, 320)
SMALL_BAR, LARGE_BAR = 1.3, 0.92  # times a copy's time; of its bandwidth
LAYOUTS = {"NeoX": False, "interleaved": True}
DIRECTIONS = ("forward", "backward")
# Rivals rotate these, NeoX; the last of the sizes is compiled for.
RIVAL_HEADS, RIVAL_MIB = (32, 8), (64, 320)
RIVAL_SECONDS = 40
MEGATRON = "Megatron's unfused function, kernels only"
COMPILED = "torch.compile of Megatron's function on gathered angles, kernels only"
TRANSFORMER_ENGINE = "Transformer Engine's fused kernel, one launch each for q and k, kernels only"


@dataclass(frozen=True)
class Inputs:
    """q, k and gradients of a pack.

    Args:
        heads: of q and of k.
        mib: bytes of q and k together, at least, in MiB.
    """

    heads: tuple[int, int]
    mib: int

    def __str__(self) -> str:
        return f"{self.heads[0]}+{self.heads[1]} heads, {self.tokens} tokens, {self.mib} MiB"

    @property
    def tokens(self) -> int:
        """Rows; a multiple of 16."""
        row_bytes = sum(self.heads) * HEAD_DIM * 2
        return -(-(self.mib << 20) // row_bytes // 16) * 16

    @property
    def num_bytes(self) -> int:
        """Of q and k together."""
        return self.tokens * sum(self.heads) * HEAD_DIM * 2

    def offsets(self) -> Tensor:
        """About a document for each 1,024 rows, which fill the pack."""
        return lognormal_offsets(self.tokens, max(round(self.tokens / 1024), 1), device=DEVICE)

    def pair(self) -> list[Tensor]:
        """Random q and k, [T, heads, 128]."""
        return [
            torch.randn(self.tokens, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
            for heads in self.heads
        ]

    def angles(self, *, interleaved: bool) -> Tensor:
        """Of each position of the longest document and one more, [positions, 1, 1, 128] in float32.

        One more, since Megatron takes as many positions as rows for an angle of each row.
        """
        positions = int(self.offsets().diff().max()) + 1
        inverse = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
        half = torch.outer(torch.arange(positions, device=DEVICE, dtype=torch.float32), inverse)
        wide = half.repeat_interleave(2, 1) if interleaved else torch.cat((half, half), -1)
        return wide[:, None, None, :]


def run() -> None:
    """Measures, and writes benchmarks/results/rope.json."""
    answers = collect("benchmarks.bench_rope", "rivals", timeout=RIVAL_SECONDS)
    measurement = Measurement("rope")
    for heads, mib in itertools.product(((32, 8), (16, 4)), (*SMALL_MIB, *LARGE_MIB)):
        inputs = Inputs(heads, mib)
        measurement.take(str(inputs), partial(_measure, inputs, answers))
    measurement.publish()


def _measure(inputs: Inputs, answers: defaultdict[str, Answer]) -> list[results.Figure]:
    figures: list[results.Figure] = []
    cu_seqlens, tensors, copying = inputs.offsets(), inputs.pair(), copy_of(inputs.num_bytes)
    for cold in (False, True):
        for (layout, interleaved), direction in itertools.product(LAYOUTS.items(), DIRECTIONS):
            angles = inputs.angles(interleaved=interleaved).flatten(1)
            cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
            call = _ours(direction, tensors, cos, sin, cu_seqlens, interleaved)
            ours, copy = (times.median for times in device_us_in_turns((call, copying), cold=cold))
            name = f"{inputs}, {layout}, {direction}, {'cold' if cold else 'warm'}"
            if inputs.mib in SMALL_MIB:
                figures.append(
                    results.Figure(
                        name=f"{name}: time over a copy's",
                        value=ours / copy,
                        unit="ratio",
                        bar=SMALL_BAR,
                        floor=1.0,
                    )
                )
                continue
            figures.append(
                results.Figure(
                    name=f"{name}: share of a copy's bandwidth",
                    value=copy / ours,
                    unit="share",
                    bar=LARGE_BAR,
                    better="higher",
                    floor=1.0,
                )
            )
            if (inputs.heads, layout, cold) == (RIVAL_HEADS, "NeoX", False) and inputs.mib in RIVAL_MIB:
                figures += _beside_rivals(name, inputs.mib, direction, copy, ours, answers)
    return figures


def _ours(
    direction: str, tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, cu_seqlens: Tensor, interleaved: bool
) -> Callable[[], object]:
    if direction == "forward":
        return lambda: ops.rope_thd(tensors, cos, sin, cu_seqlens, interleaved=interleaved)
    backward = torch.ops.megagraph.rope_thd_backward
    return lambda: backward(tensors, cos, sin, cu_seqlens, interleaved=interleaved)


def _beside_rivals(
    name: str, mib: int, direction: str, copy: float, ours: float, answers: defaultdict[str, Answer]
) -> list[results.Figure]:
    measured = [MEGATRON, TRANSFORMER_ENGINE, *([COMPILED] if mib == RIVAL_MIB[-1] else [])]
    return against_each(
        f"{name}: share of a copy's bandwidth, beside a rival",
        copy / ours,
        "share",
        {rival: answers[_key(rival, mib, direction)] for rival in measured},
        lambda answer: copy / float(answer["us"]),
        bar=LARGE_BAR,
        better="higher",
        floor=1.0,
    )


def _key(rival: str, mib: int, direction: str) -> str:
    return f"{rival}; {mib}; {direction}"


class _OneRank:
    """Stands in for a context-parallel group of one process."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


# Rotates q and k.
Rotation = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _tell_rival(rival: str, inputs: Inputs, make: Callable[[Inputs], Rotation]) -> None:
    """Measures q and k, forward and backward."""
    leaves, grads = [t.requires_grad_() for t in inputs.pair()], inputs.pair()
    rotated: list[Tensor] = []

    def forward() -> float:
        rotate = make(inputs)
        rotated[:] = rotate(leaves)
        return kernel_us(lambda: rotate(leaves))

    def backward() -> float:
        if not rotated:
            raise RuntimeError("its forward failed")
        return kernel_us(lambda: torch.autograd.grad(rotated, leaves, grads, retain_graph=True))

    tell(_key(rival, inputs.mib, "forward"), forward)
    tell(_key(rival, inputs.mib, "backward"), backward)


def _megatrons(inputs: Inputs) -> Rotation:
    from megatron.core.models.common.embeddings import rope_utils

    angles, cu_seqlens, group = inputs.angles(interleaved=False), inputs.offsets(), _OneRank()
    rotate = rope_utils._apply_rotary_pos_emb_thd
    return lambda tensors: [rotate(t, cu_seqlens, angles, cp_group=group) for t in tensors]


def _transformer_engines(inputs: Inputs) -> Rotation:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles, cu_seqlens = inputs.angles(interleaved=False), inputs.offsets()

    def rotate(t: Tensor) -> Tensor:
        out: Tensor = apply_rotary_pos_emb(
            t, angles, tensor_format="thd", fused=True, cu_seqlens=cu_seqlens, cp_size=1, cp_rank=0
        )
        return out

    return lambda tensors: [rotate(t) for t in tensors]


def _compiled(inputs: Inputs) -> Rotation:
    """The rotation itself, once each row has its angle; the lookup is not timed."""
    from megatron.core.models.common.embeddings import rope_utils

    cu_seqlens = inputs.offsets().long()
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    positions = torch.arange(inputs.tokens, device=DEVICE) - starts
    angles = inputs.angles(interleaved=False)[positions]
    rotate = rope_utils._apply_rotary_pos_emb_bshd

    def both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q[:, None], angles)[:, 0], rotate(k[:, None], angles)[:, 0]

    compiled = torch.compile(both, dynamic=False)
    return lambda tensors: compiled(*tensors)


def _tell_rivals() -> None:
    import torch._functorch.config
    import torch._inductor.config

    # One process compiles, and a backward pass runs more than once.
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.donated_buffer = False
    for mib in RIVAL_MIB:
        inputs = Inputs(RIVAL_HEADS, mib)
        _tell_rival(MEGATRON, inputs, _megatrons)
        _tell_rival(TRANSFORMER_ENGINE, inputs, _transformer_engines)
    _tell_rival(COMPILED, inputs, _compiled)


if __name__ == "__main__":
    if sys.argv[1:] != ["rivals"]:
        sys.exit("usage: python -m benchmarks.bench_rope rivals")
    _tell_rivals()
