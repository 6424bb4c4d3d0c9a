# SPDX-License-Identifier: Apache-2.0
"""RoPE of packs against a device copy of as many bytes, and against other ways to rotate a pack.

`rope_thd` rotates q and k; multi-latent attention has queries, keys and values in one launch. Ours and the
copy are timed alike, in turns, between events. Bytes are those that the work has to read and write, without
tables. Of a rival only the kernels count, without the gaps between them: its host may be slower than the GPU.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer, caught, try_part
from benchmarks.measuring.clocks import copy_of, device_us, kernel_us
from benchmarks.measuring.figures import Measurement, beside, timed_ratio
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import Parts, answering
from benchmarks.subjects.packs import lognormal_offsets
from megagraph.packs import ops

DEVICE = "cuda"
HEAD_DIM = 128
SMALL_MIB, LARGE_MIB = (8, 16, 32), (64, 160, 320)
SMALL_BAR, LARGE_BAR = 1.3, 0.92  # times a copy's time; of its bandwidth
LAYOUTS: dict[str, ops.RopeLayout] = {"NeoX": "neox", "interleaved": "interleaved"}
DIRECTIONS = ("forward", "backward")
RIVAL = "Transformer Engine's fused kernel, one launch each for q and k, kernels only"
CONTENT, ROTARY, VALUE = 128, 64, 128  # of multi-latent attention: DeepSeek's heads
MLA_HEADS, MLA_MIB, MLA_BAR = (16, 128), (64, 256, 1024), 0.85  # of a copy's bandwidth
MLA_RIVAL = "Megatron's fused kernels, kernels only"

# Rotates, what it rotates, and gradients of what comes out.
Rotation = tuple[Callable[[], Sequence[Tensor]], list[Tensor], list[Tensor]]


def _random(tokens: int, heads: int, *dims: int) -> list[Tensor]:
    """One tensor for each dimension, [T, heads, dim]."""
    return [torch.randn(tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16) for dim in dims]


def _angles(positions: int, dim: int) -> Tensor:
    """Of each position, [positions, dim / 2] in float32."""
    inverse = 10_000.0 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    return torch.outer(torch.arange(positions, device=DEVICE, dtype=torch.float32), inverse)


@dataclass(frozen=True)
class Inputs:
    """q, k and gradients of a pack, of about a document for each 1,024 rows."""

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
        return lognormal_offsets(self.tokens, device=DEVICE)

    def pair(self) -> list[Tensor]:
        """Random q and k, [T, heads, 128]."""
        return [tensor for heads in self.heads for tensor in _random(self.tokens, heads, HEAD_DIM)]

    def angles(self, *, interleaved: bool) -> Tensor:
        """Of each position of the longest document, [positions, 1, 1, 128] in float32."""
        half = _angles(int(self.offsets().diff().max()), HEAD_DIM)
        wide = half.repeat_interleave(2, 1) if interleaved else torch.cat((half, half), -1)
        return wide[:, None, None, :]


def _transformer_engines(inputs: Inputs) -> Rotation:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles, pack = inputs.angles(interleaved=False), {"tensor_format": "thd", "cu_seqlens": inputs.offsets()}
    rotate, pair = partial(apply_rotary_pos_emb, fused=True, **pack, cp_size=1, cp_rank=0), inputs.pair()
    return lambda: [rotate(t, angles) for t in pair], pair, inputs.pair()


@dataclass(frozen=True)
class MlaInputs:
    """A pack of some heads of multi-latent attention."""

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
        return lognormal_offsets(self.tokens, device=DEVICE)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Of each position of the longest document, [positions, 64]."""
        angles = _angles(int(self.offsets().diff().max()), ROTARY).repeat(1, 2)
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def given(self) -> list[Tensor]:
        """Queries, keys without a position with their values, and rotary keys."""
        of_heads = _random(self.tokens, self.heads, CONTENT + ROTARY, CONTENT + VALUE)
        return [*of_heads, *_random(self.tokens, 1, ROTARY)]

    def grads(self) -> list[Tensor]:
        """Of queries, keys and values."""
        return _random(self.tokens, self.heads, CONTENT + ROTARY, CONTENT + ROTARY, VALUE)


def _megatrons_mla(inputs: MlaInputs) -> Rotation:
    from megatron.core.fusions import fused_mla_yarn_rope_apply as theirs

    given, tables, cu_seqlens = inputs.given(), [t[:, None, None] for t in inputs.tables()], inputs.offsets()
    q, kv, k_pe = given

    def rotate() -> list[Tensor]:
        query = theirs.fused_apply_mla_rope_for_q(q, *tables, CONTENT, ROTARY, cu_seqlens)
        keys = theirs.fused_apply_mla_rope_for_kv(kv, k_pe, *tables, ROTARY, CONTENT, VALUE, cu_seqlens)
        return [query, *keys]

    return rotate, given, inputs.grads()


SIZES = [Inputs(*size) for size in itertools.product(((32, 8), (16, 4)), (*SMALL_MIB, *LARGE_MIB))]
RIVAL_SIZES = [Inputs((32, 8), mib) for mib in (64, 320)]
MLA_SIZES = [MlaInputs(*size) for size in itertools.product(MLA_HEADS, MLA_MIB)]


def _rivals() -> Answer:
    """Microseconds of each rival's kernels."""
    made = {str(size): partial(_transformer_engines, size) for size in RIVAL_SIZES}
    made |= {str(size): partial(_megatrons_mla, size) for size in MLA_SIZES}
    return {name: caught(partial(_kernels_of, make)) for name, make in made.items()}


def _kernels_of(make: Callable[[], Rotation]) -> Answer:
    rotate, leaves, grads = make()
    for leaf in leaves:
        leaf.requires_grad_()
    rotated = rotate()
    backward = partial(torch.autograd.grad, rotated, leaves, grads, retain_graph=True)
    return {"forward": kernel_us(rotate), "backward": kernel_us(backward)}


PARTS: Parts = {"rivals": _rivals}
answer = answering(PARTS)


def measure(measurement: Measurement) -> None:
    """Measures every size, and the rivals at some of them."""
    rivals = try_part(__name__, "rivals")
    for inputs in SIZES:
        measurement.take(str(inputs), partial(_figures_of, inputs, rivals))
    for mla in MLA_SIZES:
        measurement.take(str(mla), partial(_mla_figures, mla, rivals))


def _figures_of(inputs: Inputs, rivals: Answer) -> list[Figure]:
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
        if (layout, cold) == ("NeoX", False) and inputs in RIVAL_SIZES:
            figure = replace(figures[-1], name=f"{title}, beside a rival", bar=None)
            figures.append(_beside(figure, RIVAL, rivals, inputs, direction, median(copy)))
    return figures


def _mla_figures(inputs: MlaInputs, rivals: Answer) -> list[Figure]:
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
        figure = timed_ratio(name, copy, ours, "share", bar=MLA_BAR, better="higher", floor=1.0)
        if not cold:
            figure = _beside(figure, MLA_RIVAL, rivals, inputs, direction, median(copy))
        figures.append(figure)
    return figures


def _beside(
    figure: Figure, who: str, rivals: Answer, inputs: object, direction: str, copy_us: float
) -> Figure:
    return beside(figure, who, rivals.get(str(inputs), rivals), lambda its: copy_us / float(its[direction]))
