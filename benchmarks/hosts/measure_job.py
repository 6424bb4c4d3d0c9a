# SPDX-License-Identifier: Apache-2.0
"""What one process, or each rank of a `torchrun`, measures for `real_hosts`.

`python -m benchmarks.hosts.measure_job JOB WHAT` prints one line of JSON, on rank 0. Deterministic algorithms
throughout, in every timed run alike; fresh memory is not filled while a step is timed.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from benchmarks.hosts.prepare_megatron import prepare_megatrons_graphs, seed_streams
from benchmarks.packs.cases import MICRO_BATCHES, Case, model_options
from megagraph import megatron
from megagraph.cli.demo import quiet_megatron
from megagraph.config import GraphConfig
from megagraph.demo.compare import compare_steps, time_steps
from megagraph.demo.packers import Pack
from megagraph.demo.trainer import ModelOptions, Trainer, process_groups

COMPARED_STEPS = 104
TIMED_STEPS = 20
WARM_UP_STEPS = 6
CAPTURED_STEPS = 3  # after which Transformer Engine's graphs are made


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model on one arrangement of ranks.

    Args:
        model: its shape.
        ranks: processes, each on a GPU of its own.
        transformer_engine: layers of Transformer Engine's modules, with fused RoPE.
        transformer: further fields of Megatron's config.
        ddp: further fields of Megatron's DDP config.
        steps: compared.
        num_seqs: documents of the largest capacity; some packs hold more.
        longest: tokens of a document. Transformer Engine's deterministic attention of packs takes 128 bytes
            of memory for each document * head * longest**2.
    """

    model: ModelOptions
    ranks: int = 1
    transformer_engine: bool = False
    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    steps: int = COMPARED_STEPS
    num_seqs: int = 20
    longest: int = 1024

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each layer."""
        size: int = self.transformer.get("tensor_model_parallel_size", 1)
        return size

    def packs(self, steps: int) -> list[list[Pack]]:
        """The packs of each step on this rank; ranks that share layers see the same."""
        case = Case(
            name="packs",
            model=self.model,
            max_packed_seqs=(8, self.num_seqs),
            mean_length=self.model.max_tokens // 8,
            longest=min(self.longest, self.model.max_tokens),
            multiple=self.tensor_parallel,
        )
        groups = self.ranks // self.tensor_parallel
        mine = (distributed.get_rank() if distributed.is_initialized() else 0) // self.tensor_parallel
        return case.steps(steps * groups)[mine::groups]

    def trainer(self, **transformer: Any) -> Trainer:
        """A fresh model; the same weights every time."""
        spec = None
        if self.transformer_engine:
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

            spec = get_gpt_layer_with_transformer_engine_spec()
            transformer = {"apply_rope_fusion": True, **transformer}
        return Trainer(self.model, config={**self.transformer, **transformer}, ddp=self.ddp, spec=spec)


_SHARED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_OVERLAP = {"overlap_grad_reduce": True}
_GATHER = {**_OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}
_BUCKETS = {"bucket_size": 5_000_000}
_SMALL = model_options(1024, layers=8, tokens=4096)
JOBS = {
    "Transformer Engine, 12 layers of hidden 1024": Job(
        model=model_options(1024, layers=12, tokens=4096), transformer_engine=True
    ),
    "Transformer Engine, 4 layers of hidden 4096": Job(
        model=model_options(4096, layers=4, tokens=2048), transformer_engine=True, longest=512
    ),
    "Transformer Engine, hidden 1024": Job(
        model=model_options(1024, layers=24, tokens=4096), transformer_engine=True
    ),
    "local, hidden 1024": Job(model=model_options(1024, layers=24, tokens=4096)),
    "TP=2 with SP": Job(model=_SMALL, ranks=2, transformer=_SHARED, steps=40),
    "TP=2 with SP, Transformer Engine": Job(
        model=_SMALL, ranks=2, transformer=_SHARED, transformer_engine=True, steps=40
    ),
    "DP=2": Job(model=_SMALL, ranks=2, num_seqs=12, steps=40),
    "DP=2, overlap_grad_reduce": Job(
        model=_SMALL, ranks=2, ddp={**_OVERLAP, **_BUCKETS}, num_seqs=12, steps=40
    ),
    "DP=2, distributed optimizer": Job(
        model=_SMALL, ranks=2, ddp={"use_distributed_optimizer": True}, num_seqs=12, steps=40
    ),
    "DP=2, overlap_param_gather": Job(
        model=_SMALL, ranks=2, ddp={**_GATHER, **_BUCKETS}, num_seqs=12, steps=40
    ),
    "DP=2, align_param_gather": Job(
        model=_SMALL, ranks=2, ddp={**_GATHER, **_BUCKETS, "align_param_gather": True}, num_seqs=12, steps=40
    ),
    # Short: what is measured is how it ends.
    "exit": Job(model=model_options(256, layers=2, tokens=512), ranks=2, transformer=_SHARED, steps=8),
}


def _install(job: Job) -> None:
    megatron.install(
        GraphConfig(
            cuda_graph_max_packed_seqs=(8, job.num_seqs),
            max_seqlen_per_dp_cp_rank=job.model.max_tokens,
            max_seqlen=min(job.longest, job.model.max_tokens),
            progress=False,
            log_interval=0,
        )
    )


def measure_bits(job: Job) -> dict[str, Any]:
    """Trains eager and graphed from the same weights and compares every bit, on every rank."""
    _install(job)
    eager, graphed = job.trainer(), job.trainer()
    agreement = compare_steps(eager, graphed, job.packs(job.steps))
    mine = {"differences": agreement.differences, "report": megatron.reports()[-1]}
    everyone: list[Any] = [mine]
    if job.ranks > 1:
        everyone = [None] * job.ranks
        distributed.all_gather_object(everyone, mine)
    return {
        "steps": agreement.steps,
        "differences": [text for rank in everyone for text in rank["differences"]],
        "reports": [rank["report"] for rank in everyone],
    }


def _canonical(packs: Sequence[Sequence[Pack]], job: Job) -> list[list[Pack]]:
    """Packs of one shape: one more document fills the rows up, empty ones follow."""

    def padded(pack: Pack) -> Pack:
        missing = job.num_seqs + 1 - pack.cu_seqlens.numel()
        offsets = torch.nn.functional.pad(pack.cu_seqlens, (0, missing), value=job.model.max_tokens)
        rows = torch.nn.functional.pad(pack.tokens, (0, job.model.max_tokens - pack.num_tokens))
        return dataclasses.replace(pack, tokens=rows, cu_seqlens=offsets, max_seqlen=job.longest)

    return [[padded(pack) for pack in step] for step in packs]


def measure_time(job: Job, what: str) -> dict[str, Any]:
    """Step time of one way to run the model, on packs that fit.

    Args:
        job: the model.
        what: `eager` or `megagraph`; `local` or `transformer_engine`, Megatron's own graphs, with
            nothing of ours installed; each also as `eager, canonical packs`.
    """
    steps = job.packs(WARM_UP_STEPS + TIMED_STEPS)
    fitting = [[pack for pack in step if pack.num_seqs < job.num_seqs] for step in steps]
    kind, _, packs = what.partition(", ")
    if packs:
        fitting = _canonical(fitting, job)
    if kind in ("eager", "megagraph"):
        _install(job)
        trainer = job.trainer()
        time_steps(trainer, fitting[:WARM_UP_STEPS], graphs=kind == "megagraph")
    else:
        trainer = _with_megatrons_graphs(job, kind, fitting[:WARM_UP_STEPS])
    times = time_steps(trainer, fitting[WARM_UP_STEPS:], graphs=kind != "eager")
    if kind == "megagraph":
        _check_replays(megatron.reports()[-1])
    return {"median_ms": times.median_ms, "fastest_ms": times.fastest_ms}


def _check_replays(report: dict[str, Any]) -> None:
    """Raises `RuntimeError` where packs that fit were not replayed after the warm-up."""
    if not report["replays"] or report["failures"] or set(report["eager"]) - {"WARMING_UP"}:
        raise RuntimeError(f"expected replays, got {report['eager']}, {report['failures']}")


def _with_megatrons_graphs(job: Job, impl: str, steps: Sequence[Sequence[Pack]]) -> Trainer:
    prepare_megatrons_graphs(MICRO_BATCHES)
    trainer = job.trainer(cuda_graph_impl=impl, cuda_graph_modules=[])
    time_steps(trainer, steps[:CAPTURED_STEPS], graphs=True)
    if impl == "transformer_engine":
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        helper = TECudaGraphHelper(
            model=[trainer.model],
            config=trainer.chunk.config,
            seq_length=job.model.max_tokens,
            micro_batch_size=1,
            optimizers=[trainer.optimizer],
        )
        helper.create_cudagraphs()
        helper.cuda_graph_set_manual_hooks()
    time_steps(trainer, steps[CAPTURED_STEPS:], graphs=True)
    return trainer


def main(name: str, what: str) -> None:
    """Measures and prints."""
    quiet_megatron()
    job = JOBS[name]
    torch.use_deterministic_algorithms(True)
    with process_groups(job.tensor_parallel):
        rank = distributed.get_rank()
        seed_streams()  # sequence parallelism swaps them in whether anything drops out or not
        measured = measure_bits(job) if what == "bits" else measure_time(job, what)
        megatron.uninstall()
    if rank == 0:
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    main(*sys.argv[1:])
