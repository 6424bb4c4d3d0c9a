# SPDX-License-Identifier: Apache-2.0
"""A rank of a job of its own, as torchrun starts it: trains on packs of several sizes, and ends."""

import os
import sys

import sharing_jobs
import torch
import worlds
from torch import distributed

from megagraph.demo.cpu import megatron_on_cpu


def main(way: str) -> None:
    """Runs and ends; `way` is that of `sharing_jobs.end()`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        worlds.take_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(7)
        sharing_jobs.end(way)
    print("has ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
