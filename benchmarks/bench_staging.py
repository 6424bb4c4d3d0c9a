# SPDX-License-Identifier: Apache-2.0
"""The staging of a micro-batch: the one kernel that fills a graph's static buffers.

Chains of one trivial module bring it about. The profiler tells its time from that of the graph.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.measuring.clocks import Work, device_work, times_of
from benchmarks.measuring.figures import Measurement, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.packs import lognormal_offsets, variant_of
from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.sites import MetadataSpec, VariantSpec

DEVICE = "cuda"
TOKENS = 8192  # of the packs whose metadata alone are staged
CAPACITIES = (64, 256)  # document slots
HIDDEN_SHAPES = ((8192, 1024), (8192, 4096), (16384, 2048))
TAIL = 100  # rows past the last document
KERNEL, COPY = "stage_segments_kernel", "Memcpy DtoD"
CACHES = ("warm cache", "cold cache")
REPEATS = 30


class _Glance(nn.Module):
    """The least that is a graph: looks at eight columns."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., :8] + 1


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What a micro-batch stages."""

    documents: int  # slots of the offsets; three quarters are used
    tokens: int  # rows of the pack
    # [rows, 1, width] of the hidden states. Eight rows of 16 bytes leave the metadata alone.
    hidden: tuple[int, int, int] = (8, 1, 8)
    # Whether a mask and a position of each row are staged too. Megatron's packs have neither: attention and
    # rotary embedding work from the offsets.
    rows_described: bool = False

    def __str__(self) -> str:
        what = f"offsets of {self.documents} documents, a count"
        return f"{what}, a mask and positions of {self.tokens} rows" if self.rows_described else what

    def sources(self) -> list[Tensor]:
        """Offsets of the documents, the same as physical ones, and positions."""
        offsets = lognormal_offsets(self.tokens - TAIL, self.documents * 3 // 4, device=DEVICE)
        positions = torch.arange(self.tokens, device=DEVICE, dtype=torch.int32)
        return [offsets, offsets.clone(), positions]

    def variant(self) -> VariantSpec:
        """As the Megatron floor describes a pack: two offsets and a count of the valid tokens."""
        kinds = _C.SegmentKind
        example = torch.linspace(0, self.tokens, self.documents + 1).to(DEVICE, torch.int32)
        count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        metadata = {
            "actual": MetadataSpec(kind=kinds.OFFSETS, example=example, source=0),
            "padded": MetadataSpec(kind=kinds.OFFSETS, example=example, source=1),
            "valid_tokens": MetadataSpec(kind=kinds.COUNT, example=count, source=0, shared=True),
        }
        if self.rows_described:
            zeros = partial(torch.zeros, self.tokens, device=DEVICE)
            mask, positions = zeros(dtype=torch.bool), zeros(dtype=torch.int32)
            metadata["mask"] = MetadataSpec(kind=kinds.MASK, example=mask, source=-1)
            metadata["positions"] = MetadataSpec(kind=kinds.COPY, example=positions, source=2)
        hidden = torch.empty(self.hidden, dtype=torch.bfloat16, device="meta")
        return variant_of(hidden, training=False, metadata=metadata, end_source=1)


def device_work_of(staged: Staged, *, cold: bool) -> list[Work]:
    """What runs on the device in `REPEATS` micro-batches that stage this."""
    glance = _Glance()  # which a bank does not keep alive
    bank = Bank([glance], DEVICE)
    bank.capture([staged.variant()])
    if bank.failures:
        raise RuntimeError(f"nothing was captured: {bank.failures[0]}")
    sources = staged.sources()
    hidden = torch.randn(staged.hidden, device=DEVICE, dtype=torch.bfloat16)

    def micro_batch() -> None:
        with torch.no_grad(), bank.micro_batch("pack", sources) as reason:
            if reason is not None:
                raise RuntimeError(f"a micro-batch found no slot: {reason.name}")
            bank(hidden)

    try:
        work = device_work(micro_batch, repeats=REPEATS, cold=cold)
        if (counters := bank.counters())["replays"] != counters["calls"]:
            raise RuntimeError(f"expected replays only, got {counters}")
        return work
    finally:
        bank.release()


def _measure_metadata() -> list[Figure]:
    tiny = torch.zeros(1, device=DEVICE)
    # The least that a launch takes: one thread writes one number.
    floor = min(w.us for w in device_work(lambda: tiny.add_(1), repeats=REPEATS) if "Mem" not in w.name)
    figures = []
    for cold, documents, described in itertools.product((False, True), CAPACITIES, (False, True)):
        staged = Staged(documents=documents, tokens=TOKENS, rows_described=described)
        times, cache = times_of(device_work_of(staged, cold=cold), KERNEL), CACHES[cold]
        figures.append(timed(f"metadata alone, {cache}: {staged}", times, "us", bar=5, floor=floor))
    return figures


def _measure_launches() -> list[Figure]:
    """Kernels of staging, copies and fills, with everything that can be staged."""
    staged = Staged(documents=64, tokens=TOKENS, hidden=(TOKENS, 1, 1024), rows_described=True)
    work = device_work_of(staged, cold=False)
    launches = [item for item in work if KERNEL in item.name or item.name.startswith("Mem")]
    name = f"launches that stage a micro-batch: {staged}, hidden states"
    return [Figure(name=name, value=len(launches) / REPEATS, unit="launches", bar=1, floor=1)]


def _measure_hidden(tokens: int, width: int) -> list[Figure]:
    staged = Staged(documents=64, tokens=tokens, hidden=(tokens, 1, width))
    source = torch.randn(staged.hidden, device=DEVICE, dtype=torch.bfloat16)
    target, figures = torch.empty_like(source), []
    what = f"hidden states of {tokens} x {width} with {TAIL} rows zeroed, and metadata"
    for cold in (False, True):
        copied = device_work(lambda: target.copy_(source), repeats=REPEATS, cold=cold)
        copy_us = median(times_of(copied, COPY))
        shares = [copy_us / us for us in times_of(device_work_of(staged, cold=cold), KERNEL)]
        name = f"{what}, {CACHES[cold]}: share of a copy's bandwidth"
        figures.append(timed(name, shares, "share", bar=0.90, better="higher", floor=1.0))
    return figures


def measure(measurement: Measurement) -> None:
    """Measures launches, metadata alone, and hidden states of several shapes."""
    measurement.take("launches", _measure_launches)
    measurement.take("metadata", _measure_metadata)
    for tokens, width in HIDDEN_SHAPES:
        measurement.take(f"hidden states of {tokens} x {width}", partial(_measure_hidden, tokens, width))
