# SPDX-License-Identifier: Apache-2.0
"""A rank of a job, as torchrun starts it: trains on packs of several sizes and ends, in each of some ways."""

import os
import sys
from typing import Any

import context_jobs
import megatron_rig as rig
import torch
import worlds
from torch import distributed

import megagraph
from megagraph.demo.cpu import megatron_on_cpu


def fail(*_args: Any) -> None:
    """A hook."""
    raise RuntimeError("on purpose")


def end(way: str) -> None:
    """Ends a job whose graphs hold communicators of several sizes."""
    trainer = context_jobs.new_trainer()
    micros = context_jobs.warmed(trainer)
    assert rig.report_of(trainer)["replays"] > 0
    if way == "raised":
        trainer.chunk.output_layer.register_forward_hook(fail)
        rig.step(trainer, micros)
    if way == "released":
        megagraph.uninstall()
    if way != "forgotten":
        distributed.destroy_process_group()


def main(way: str) -> None:
    """Makes a rank of this process, which trains and ends."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    megagraph.uninstall()  # of the way before
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        worlds.take_gpu(rank, size)
    if not distributed.is_initialized():
        # torchrun's, in which each job after another has names of its own.
        store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(
            backend, store=distributed.PrefixStore(way, store), rank=rank, world_size=size
        )
    with megatron_on_cpu():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(7)
        end(way)
    print("has ended", flush=True)


if __name__ == "__main__":
    for way in sys.argv[1:]:
        main(way)
