# SPDX-License-Identifier: Apache-2.0
"""`rope_thd` against a device copy of the same bytes, and against other ways to rotate a pack.

Ours and the copy are timed alike, in turns, between events. Of a rival only the kernels count, without the
gaps between them: its host may be slower than the GPU.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer, tell, told, try_part
from benchmarks.measuring.clocks import copy_of, device_us, kernel_us
from benchmarks.measuring.figures import Measurement, beside_each, timed_ratio
from benchmarks.measuring.results import Figure
from benchmarks.subjects.packs import lognormal_offsets
from megagraph.packs import ops

DEVICE = "cuda"
HEAD_DIM = 128
SMALL_MIB, LARGE_MIB = (8, 16, 32), (64, 160, 320)
SMALL_BAR, LARGE_BAR = 1.3, 0.92  # times a copy's time; of its bandwidth
LAYOUTS: dict[str, ops.RopeLayout] = {"NeoX": "neox", "interleaved": "interleaved"}
DIRECTIONS = ("forward", "backward")
# Rivals rotate these, NeoX; the last of the sizes is compiled for.
RIVAL_HEADS, RIVAL_MIB = (32, 8), (64, 320)
RIVAL_SECONDS = 120  # imports and a compilation among them
MEGATRON = "Megatron's unfused function, kernels only"
COMPILED = "torch.compile of Megatron's function on gathered angles, kernels only"
TRANSFORMER_ENGINE = "Transformer Engine's fused kernel, one launch each for q and k, kernels only"


@dataclass(frozen=True)
class Inputs:
    """q, k and gradients of a pack."""

    heads: tuple[int, int]  # of q and of k
    mib: int  # bytes of q and k together, at least, in MiB

    def __str__(self) -> str:
        return f"{self.heads[0]}+{self.heads[1]} heads, {self.tokens} tokens, {self.mib} MiB"

    @property
    def tokens(self) -> int:
        """Rows; a multiple of 16."""
        row_bytes = sum(self.heads) * HEAD_DIM * 2
        return -(-(self.mib << 20) // row_bytes // 16) * 16

    def offsets(self) -> Tensor:
        """About a document for each 1,024 rows, which fill the pack."""
        return lognormal_offsets(self.tokens, device=DEVICE)

    def pair(self) -> list[Tensor]:
        """Random q and k, [T, heads, 128]."""
        random = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        return [random(self.tokens, heads, HEAD_DIM) for heads in self.heads]

    def angles(self, *, interleaved: bool) -> Tensor:
        """Of each position of the longest document and one more, [positions, 1, 1, 128] in float32.

        One more, since Megatron takes as many positions as rows for an angle of each row.
        """
        positions = int(self.offsets().diff().max()) + 1
        inverse = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
        half = torch.outer(torch.arange(positions, device=DEVICE, dtype=torch.float32), inverse)
        wide = half.repeat_interleave(2, 1) if interleaved else torch.cat((half, half), -1)
        return wide[:, None, None, :]


def measure(measurement: Measurement) -> None:
    """Measures every size of both models, and the rivals at two of them."""
    answer = try_part(__name__, timeout=RIVAL_SECONDS)
    for heads, mib in itertools.product(((32, 8), (16, 4)), (*SMALL_MIB, *LARGE_MIB)):
        inputs = Inputs(heads, mib)
        measurement.take(str(inputs), partial(_figures_of, inputs, answer))


def _figures_of(inputs: Inputs, answer: Answer) -> list[Figure]:
    figures: list[Figure] = []
    cu_seqlens, tensors = inputs.offsets(), inputs.pair()
    copying = copy_of(inputs.tokens * sum(inputs.heads) * HEAD_DIM * 2)
    for cold, layout, direction in itertools.product((False, True), LAYOUTS, DIRECTIONS):
        is_forward, interleaved = direction == "forward", layout == "interleaved"
        angles = inputs.angles(interleaved=interleaved).flatten(1)
        how = (tensors, angles.cos().bfloat16(), angles.sin().bfloat16(), cu_seqlens)
        forward = partial(ops.rope_thd, *how, layout=LAYOUTS[layout])
        backward = partial(torch.ops.megagraph.rope_thd_backward, *how, interleaved=interleaved)
        ours, copy = device_us((forward if is_forward else backward, copying), cold=cold)
        name = f"{inputs}, {layout}, {direction}, {'cold' if cold else 'warm'}"
        if inputs.mib in SMALL_MIB:
            title = f"{name}: time over a copy's"
            figures.append(timed_ratio(title, ours, copy, "ratio", bar=SMALL_BAR, floor=1.0))
            continue
        title, more = f"{name}: share of a copy's bandwidth", {"bar": LARGE_BAR, "better": "higher"}
        figures.append(timed_ratio(title, copy, ours, "share", **more, floor=1.0))
        if (inputs.heads, layout, cold) == (RIVAL_HEADS, "NeoX", False) and inputs.mib in RIVAL_MIB:
            rivals = {who: told(answer, _key(who, inputs.mib, direction)) for who in _rivals_at(inputs.mib)}
            figure = replace(figures[-1], name=f"{title}, beside a rival")
            figures += beside_each(figure, rivals, partial(_share_of, median(copy)))
    return figures


def _share_of(copy_us: float, answer: Answer) -> float:
    return copy_us / float(answer["us"])


def _key(rival: str, mib: int, direction: str) -> str:
    return f"{rival}; {mib}; {direction}"


# Rotates q and k.
Rotation = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _megatrons(inputs: Inputs) -> Rotation:
    from megatron.core.models.common.embeddings import rope_utils

    angles, cu_seqlens = inputs.angles(interleaved=False), inputs.offsets()
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # context-parallel, of one process
    rotate = rope_utils._apply_rotary_pos_emb_thd
    return lambda tensors: [rotate(t, cu_seqlens, angles, cp_group=group) for t in tensors]


def _transformer_engines(inputs: Inputs) -> Rotation:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles, pack = inputs.angles(interleaved=False), {"tensor_format": "thd", "cu_seqlens": inputs.offsets()}
    rotate = partial(apply_rotary_pos_emb, fused=True, **pack, cp_size=1, cp_rank=0)
    return lambda tensors: [rotate(t, angles) for t in tensors]


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


def _rivals_at(mib: int) -> dict[str, Callable[[Inputs], Rotation]]:
    further = {COMPILED: _compiled} if mib == RIVAL_MIB[-1] else {}
    return {MEGATRON: _megatrons, TRANSFORMER_ENGINE: _transformer_engines, **further}


def answer() -> None:
    """Tells of each rival, forward and backward of q and k."""
    import torch._functorch.config
    import torch._inductor.config

    # One process compiles, and a backward pass runs more than once.
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.donated_buffer = False
    for mib in RIVAL_MIB:
        for rival, make in _rivals_at(mib).items():
            _tell_rival(rival, Inputs(RIVAL_HEADS, mib), make)


def _tell_rival(rival: str, inputs: Inputs, make: Callable[[Inputs], Rotation]) -> None:
    leaves, grads, rotated = [t.requires_grad_() for t in inputs.pair()], inputs.pair(), list[Tensor]()

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
