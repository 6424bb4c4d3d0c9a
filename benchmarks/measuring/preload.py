# SPDX-License-Identifier: Apache-2.0
"""Imports, once, what most processes of the benchmarks import: they are forked from the one that did.

No module that is run as `__main__`, and nothing that makes a CUDA context. What cannot be imported is left
to those who ask for it. `STARTED_WITH` is the environment before all this.
"""

import importlib
import os
import signal
import sys
import warnings

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_SECONDS = 180  # a server that hangs in an import ends, and every process starts afresh
_MODULES = (
    "torch.distributed",
    "torch.utils.cpp_extension",
    "transformer_engine.pytorch",
    "megatron.core.distributed",
    "megatron.core.full_cuda_graph",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.cuda_graphs",
    "benchmarks.attention.capture_attention",
    "benchmarks.hosts.prepare_megatron",
    "benchmarks.measuring.fork_children",
    "benchmarks.measuring.publish",
    "benchmarks.measuring.read_timeline",
    "benchmarks.measuring.time_calls",
    "benchmarks.measuring.time_kernels",
    "benchmarks.packs.cases",
    "benchmarks.packs.step_cases",
    "benchmarks.replay.time_eager_calls",
    "benchmarks.replay.time_own_replays",
    "benchmarks.step.time_own_steps",
    "benchmarks.step.time_step_rivals",
    "megagraph.cli.demo",
)

STARTED_WITH = dict(os.environ)


def _import_all() -> None:
    # Whether there is a GPU is asked of NVML: the CUDA runtime would not work in forks any more.
    os.environ[_NVML_CHECK] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _MODULES:
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError:
                    pass
                except (Exception, SystemExit) as error:
                    print(f"not imported beforehand: {name}: {error}", file=sys.stderr, flush=True)
    finally:
        del os.environ[_NVML_CHECK]
        os.environ.update({name: value for name, value in STARTED_WITH.items() if name == _NVML_CHECK})


signal.alarm(_SECONDS)
_import_all()
signal.alarm(0)
