# SPDX-License-Identifier: Apache-2.0
"""The staging of a micro-batch: the one kernel that fills a graph's static buffers.

Chains of one trivial module bring it about. The profiler tells its time from that of the graph.
"""

import itertools
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
from megagraph.bank.sites import MetadataSpec

DEVICE = "cuda"
TOKENS = 8192  # of the packs whose metadata alone are staged
CAPACITIES = (64, 256)  # document slots, of which three quarters are used
HIDDEN_SHAPES = ((8192, 1024), (8192, 4096), (16384, 2048))
TAIL = 100  # rows past the last document
KERNEL, COPY = "stage_segments_kernel", "Memcpy DtoD"
CACHES = ("warm cache", "cold cache")
REPEATS = 30


class _Glance(nn.Module):
    """The least that is a graph: looks at eight columns."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., :8] + 1


def device_work_of(documents: int, tokens: int, hidden: Tensor, *, cold: bool) -> list[Work]:
    """What runs on the device in `REPEATS` micro-batches that stage hidden states and a pack's metadata.

    These are as the Megatron floor describes a pack: two offsets and a count of the valid tokens.
    """
    offsets = lognormal_offsets(tokens - TAIL, documents * 3 // 4, device=DEVICE)
    sources = [offsets, offsets.clone()]
    kinds = _C.SegmentKind
    example = torch.linspace(0, tokens, documents + 1).to(DEVICE, torch.int32)
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    metadata = {
        "actual": MetadataSpec(kind=kinds.OFFSETS, example=example, source=0),
        "padded": MetadataSpec(kind=kinds.OFFSETS, example=example, source=1),
        "valid_tokens": MetadataSpec(kind=kinds.COUNT, example=count, source=0, shared=True),
    }
    glance = _Glance()  # which a bank does not keep alive
    bank = Bank([glance], DEVICE)
    bank.capture([variant_of(hidden, training=False, metadata=metadata, end_source=1)])
    if bank.failures:
        raise RuntimeError(f"nothing was captured: {bank.failures[0]}")

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


def _hidden(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, 1, width, device=DEVICE, dtype=torch.bfloat16)


def _measure_metadata() -> list[Figure]:
    tiny = torch.zeros(1, device=DEVICE)
    # The least that a launch takes: one thread writes one number.
    floor = min(w.us for w in device_work(lambda: tiny.add_(1), repeats=REPEATS) if "Mem" not in w.name)
    figures = []
    for cold, documents in itertools.product((False, True), CAPACITIES):
        # Eight rows of 16 bytes leave the metadata alone.
        times = times_of(device_work_of(documents, TOKENS, _hidden(8, 8), cold=cold), KERNEL)
        name = f"metadata alone, {CACHES[cold]}: offsets of {documents} documents, a count"
        figures.append(timed(name, times, "us", bar=5, floor=floor))
    return figures


def _measure_hidden(tokens: int, width: int) -> list[Figure]:
    source = _hidden(tokens, width)
    target, figures = torch.empty_like(source), []
    what = f"hidden states of {tokens} x {width} with {TAIL} rows zeroed, and metadata"
    for cold in (False, True):
        copied = device_work(lambda: target.copy_(source), repeats=REPEATS, cold=cold)
        copy_us = median(times_of(copied, COPY))
        staged = times_of(device_work_of(64, tokens, source, cold=cold), KERNEL)
        name = f"{what}, {CACHES[cold]}: share of a copy's bandwidth"
        shares = [copy_us / us for us in staged]
        figures.append(timed(name, shares, "share", bar=0.90, better="higher", floor=1.0))
    return figures


def measure(measurement: Measurement) -> None:
    """Measures metadata alone, and hidden states of several shapes."""
    measurement.take("metadata", _measure_metadata)
    for tokens, width in HIDDEN_SHAPES:
        measurement.take(f"hidden states of {tokens} x {width}", partial(_measure_hidden, tokens, width))
