# SPDX-License-Identifier: Apache-2.0
"""What hosts do around a model: install the plugin, seed random streams, build on a stream of its own."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

import megagraph
from megagraph.config import GraphConfig
from megagraph.demo.trainer import ModelOptions, Trainer

Made = TypeVar("Made", bound=Trainer)

# Read when cuBLAS starts, and when Transformer Engine makes an attention module.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def install(**options: Any) -> None:
    """Installs the plugin, with no line of its own."""
    megagraph.install(GraphConfig(**{"progress": False, "log_interval": 0, **options}))


def install_for(tokens: int, *num_seqs: int, **options: Any) -> None:
    """As `install()`, for packs of `tokens`, a capacity for each number of documents."""
    install(cuda_graph_max_packed_seqs=num_seqs, max_seqlen_per_dp_cp_rank=tokens, **options)


def check_replays(report: dict[str, Any], *expected: str) -> None:
    """Raises `RuntimeError` where nothing replayed, or something was eager beside `expected` reasons."""
    if not report["replays"] or report["failures"] or set(report["eager"]) - {"WARMING_UP", *expected}:
        raise RuntimeError(f"expected replays, got {report['eager']}, {report['failures']}")


def seed_streams(*, for_graphs: bool = False) -> None:
    """Megatron's random streams, from which weights are drawn; `for_graphs` a graph can advance them."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234, te_rng_tracker=for_graphs, force_reset_rng=True)


def engines_spec(**kind: Any) -> Any:
    """Of layers of Transformer Engine's modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(**kind)


def prepare_rival(micro_batches: int) -> None:
    """Before a model with Megatron's own graphs is built: they also ask how many micro-batches there are."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    seed_streams(for_graphs=True)
    init_num_microbatches_calculator(0, None, micro_batches, 1, 1)


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    """Runs what is inside on a stream of its own, and has the current one wait for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def made_quickly(
    kind: type[Made],
    options: ModelOptions,
    *,
    beside: bool = False,
    config: Mapping[str, Any] = {},
    **further: Any,
) -> Made:
    """A trainer whose weights are drawn on the device.

    With `beside` it is built on a side stream, as Megatron-LM does: its DDP then adds gradients to
    `main_grad` beside the backward pass.
    """
    with on_side_stream() if beside else contextlib.nullcontext():
        return kind(options, config={"use_cpu_initialization": False, **config}, **further)


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """What replays a CUDA graph of `call`."""
    with on_side_stream():
        for _ in range(2):
            call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
