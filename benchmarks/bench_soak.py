# SPDX-License-Identifier: Apache-2.0
"""A million replays of layers: every loss and gradient has the bits of eager, and no memory grows.

Weights stay as they are, so that a few steps, each of other packs, have one right answer each, which a first
round takes without graphs. Freed slots are filled with NaN: what reads one late differs.
"""

import ctypes
import math
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, distributed

from benchmarks.measuring.children import Answer, Parts, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import check_replays, install_for, made_quickly
from benchmarks.subjects.inside import graphs_of
from benchmarks.subjects.packs import Case, model_options
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import ModelOptions, Trainer
from megagraph.megatron.plugin import disable_cuda_graphs_this_step

REPLAYS, STEPS, SAMPLES = 1_000_000, 8, 1000  # samples of the memory; the first one is what counts
DOCUMENTS = 64  # the most of a pack: a document has at least a 64th of the tokens


def used_bytes() -> dict[str, int]:
    """Memory of this process, less what malloc keeps free, and all that is in use on its device.

    Pages of files are not counted: the kernel drops a library's, and brings them back, as it likes.
    """
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    own = sum(map(int, re.findall(r"(?:RssAnon|VmSwap):\s*(\d+) kB", status)))
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"process": own * 1024, "device": total - free}


# Those of one rank change nothing, and NCCL 2.27.3 to 2.28.9 (torch 2.11) loses 160 bytes of the host in each
# (https://github.com/NVIDIA/nccl/issues/1944): 2 KiB in a step, most of it in Megatron's loss.
@mock.patch.object(distributed, "all_reduce", lambda *_args, **_kwargs: None)
def measure_soak(options: ModelOptions, replays: int) -> Answer:
    """Steps that differ from eager, and by how many bytes memory grew after the first sample."""
    install_for(options.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, poison=True)
    trainer = made_quickly(Trainer, options)
    steps = Case(name="soak", model=options, max_packed_seqs=(DOCUMENTS,), mean_length=48).steps(STEPS)

    def outcome(packs: Sequence[Pack]) -> list[Tensor]:
        losses = trainer.forward_backward(packs)
        return [torch.stack(losses), *(buffer.grad_data for buffer in trainer.model.buffers)]

    with disable_cuda_graphs_this_step():
        eager = [[each.clone() for each in outcome(packs)] for packs in steps]
    for packs in steps[:3]:  # one to warm up; before the second is the capture
        trainer.forward_backward(packs)
    report = graphs_of(trainer).report
    first, start = report()["replays"], time.perf_counter()
    count = math.ceil(replays / (options.layers * len(steps[0])))
    differing = torch.zeros((), dtype=torch.int64, device=trainer.device)
    before: dict[str, int] = {}
    grown: dict[str, int] = {}
    for index in range(count):
        found = zip(outcome(steps[index % STEPS]), eager[index % STEPS], strict=True)
        differing += torch.stack([(one != other).any() for one, other in found]).any()
        if (index + 1) * SAMPLES // count > index * SAMPLES // count:
            used = used_bytes()
            before = before or used
            grown = {what: max(size - before[what], grown.get(what, 0)) for what, size in used.items()}
    check_replays(report(), "DISABLED")
    answer = {"differing": int(differing), "steps": count, "seconds": time.perf_counter() - start}
    return {"replays": report()["replays"] - first, "grown": grown, **answer}


PARTS: Parts = {"replays": partial(measure_soak, model_options(256, layers=24, tokens=256), REPLAYS)}


def _figures() -> list[Figure]:
    answer = measure_part(__name__, "replays", timeout=900)
    grown, replays = answer["grown"], answer["replays"]
    return [
        Figure(name="replays of layers", value=replays, unit="replays", bar=REPLAYS, better="higher"),
        Figure(name="steps that differ from eager", value=answer["differing"], unit="steps", bar=0),
        Figure(name="memory of the device, growth", value=grown["device"] / MIB, unit="MiB", bar=0),
        Figure(name="memory of the process, growth", value=grown["process"] / MIB, unit="MiB", bar=1),
        Figure(name="steps", value=answer["steps"], unit="steps"),
        Figure(name="time", value=answer["seconds"], unit="s"),
    ]


FIGURES = {"replays": _figures}
