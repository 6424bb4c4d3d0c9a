# SPDX-License-Identifier: Apache-2.0
"""Models with experts for the tests of the Megatron floor, and whole runs with all that they count."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron_rig import CAPACITY, OPTIONS, Micro, Step, graph_config, report_of, step
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.config import GraphConfig
from megagraph.demo.trainer import ModelOptions, Trainer
from megagraph.megatron import seams
from megagraph.megatron.specs import get_gpt_layer_varlen_spec

EXPERTS = 4
# Of every model here; core's experts take no bias.
BASE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}
DROPS = {"moe_expert_capacity_factor": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "drop and pad": {**DROPS, "moe_pad_expert_input_to_capacity": True},
    "drop": DROPS,
    "drop by position, allgather": {
        **DROPS,
        "moe_token_drop_policy": "position",
        "moe_token_dispatcher_type": "allgather",
    },
    "shared experts": {"moe_shared_expert_intermediate_size": 24},
    "gated shared experts, allgather": {
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
        "moe_token_dispatcher_type": "allgather",
    },
    "sigmoid, bias, groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-2,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "global loss, per token": {
        "moe_router_load_balancing_type": "global_aux_loss",
        "calculate_per_token_loss": True,
    },
    "jitter": {"moe_input_jitter_eps": 1e-2},
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"], **DROPS},
}

# One pack, and tails that it is given.
PACK = Micro(lengths=(9, 14, 5))
TAILS = (0, 1, 13, CAPACITY.tokens // 2)
# Where a layer of experts can fail, in megatron.core.transformer.moe.
PLACES = {
    "dispatch": "token_dispatcher.MoEAlltoAllTokenDispatcher.token_dispatch",
    "experts": "experts.SequentialMLP.forward",
    "combine": "token_dispatcher.MoEAlltoAllTokenDispatcher.token_combine",
}


def lose(*args: Any, **kwargs: Any) -> None:
    raise OSError("lost")


class _HostStream:
    """A stream and event of the host's, where everything runs in order."""

    def wait_stream(self, stream: Any) -> None: ...
    def record_event(self) -> "_HostStream":
        return self

    def synchronize(self) -> None: ...


def _on_host(tensor: Any, as_numpy: bool = False, **_streams: Any) -> Any:
    """What core copies to the host; there it lies already, and is handed on as the copy would be."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextlib.contextmanager
def experts_on_cpu() -> Iterator[None]:
    """Lets core's experts run where there is neither a GPU nor Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    with contextlib.ExitStack() as stack:
        if not hasattr(moe_utils, "te_general_gemm"):  # which 0.16 reads where it could not import it
            stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        if not torch.cuda.is_available():
            stream = _HostStream()
            stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream))
            stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host))
            stack.enter_context(mock.patch.object(torch.cuda, "Stream", _HostStream))
            stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()))
        yield


def block_spec(kinds: str) -> Any:
    """The spec of a block: `E` for a layer of experts, `-` for a dense one."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = {
        "E": get_gpt_layer_varlen_spec(num_experts=EXPERTS, moe_grouped_gemm=False),
        "-": get_gpt_layer_varlen_spec(),
    }
    norm = layers["-"].submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in kinds], layer_norm=norm)


@dataclass(kw_only=True)
class ExpertStep:
    """What one step left, and what its layers of experts counted.

    Args:
        left: losses and gradients.
        metrics: of each name, of each layer.
        counts: tokens of each expert, of each layer that counts them, before its bias is updated.
        bias: of the experts, afterwards.
    """

    left: Step
    metrics: dict[str, Tensor]
    counts: list[Tensor]
    bias: list[Tensor]


def routers(trainer: Trainer) -> list[Any]:
    """Of all layers of experts."""
    mixtures = (getattr(layer, "mlp", None) for layer in trainer.chunk.decoder.layers)
    return [mixture.router for mixture in mixtures if hasattr(mixture, "router")]


class ExpertTrainer(Trainer):
    """A model with experts. Keeps what they counted."""

    def __init__(
        self,
        kinds: str = "EE",
        ddp: dict[str, Any] | None = None,
        spec: Any = None,
        options: ModelOptions = OPTIONS,
        **changes: Any,
    ) -> None:
        self.counts: list[Tensor] = []
        config = {**BASE, "finalize_model_grads_func": self._finalize, **changes}
        options = dataclasses.replace(options, layers=len(kinds))
        super().__init__(options, config=config, ddp=ddp, spec=block_spec(kinds) if spec is None else spec)

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.counts = [
            router.local_tokens_per_expert.clone()
            for router in routers(self)
            if router.local_tokens_per_expert is not None
        ]
        finalize_model_grads(*args, **kwargs)


def tensors_of_calls(trainer: ExpertTrainer) -> list[tuple[Any, str]]:
    """What dispatchers and shared experts keep of their last call."""
    owners = [layer.mlp.token_dispatcher for layer in trainer.chunk.decoder.layers]
    owners += [layer.mlp.shared_experts for layer in trainer.chunk.decoder.layers]
    return [
        (owner, name)
        for owner in owners
        if owner is not None
        for name, value in vars(owner).items()
        if isinstance(value, Tensor) and not name.endswith("_by_local_experts")
    ]


def metrics() -> dict[str, Tensor]:
    """What Megatron's tracker holds, by name; empties it as Megatron's log does."""
    found = {name: values.clone() for name, values in seams.moe_metrics().items()}
    for values in seams.moe_metrics().values():
        values.zero_()
    return found


def forget_metrics() -> None:
    """Before a run: nothing has been recorded yet."""
    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # 0.16
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


def expert_step(trainer: ExpertTrainer, micros: Sequence[Micro], **options: Any) -> ExpertStep:
    """One training step."""
    left = step(trainer, micros, **options)
    return ExpertStep(
        left=left,
        metrics=metrics(),
        counts=trainer.counts,
        bias=[router.expert_bias.clone() for router in routers(trainer) if router.expert_bias is not None],
    )


@dataclass(kw_only=True)
class ExpertRun:
    """A whole run."""

    steps: list[ExpertStep] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict, compare=False)


def run(
    config: GraphConfig | None,
    kinds: str,
    steps: Sequence[Sequence[Micro]],
    make: Callable[..., ExpertTrainer] = ExpertTrainer,
    **changes: Any,
) -> ExpertRun:
    """Trains a fresh model; the same arguments begin with the same weights.

    Args:
        config: installed for this run alone; None for Megatron alone.
        kinds: of its layers.
        steps: the micro-batches of each.
        make: makes its trainer.
        changes: of its config; `ddp` of its DDP's; `spec` of its block.
    """
    found = ExpertRun()
    if config is not None:
        megagraph.install(config)
    try:
        forget_metrics()
        trainer = make(kinds, **changes)
        found.steps = [expert_step(trainer, micros) for micros in steps]
        if config is not None:
            found.report = report_of(trainer)
    finally:
        megagraph.uninstall()
    return found


def steps_of(count: int, *, masks: bool = False) -> list[list[Micro]]:
    """Steps of three packs, no two alike, with tails of up to half the capacity."""

    def pack(index: int) -> Micro:
        lengths = tuple(3 + (5 * index + 7 * place) % 9 for place in range(1 + index % 5))
        return Micro(
            lengths=lengths,
            seed=index,
            tail=(7 * index) % (CAPACITY.tokens - sum(lengths)) if index % 2 else 0,
            mask_seed=index if masks else None,
        )

    return [[pack(3 * number + place) for place in range(3)] for number in range(count)]


def compare(
    kinds: str, steps: Sequence[Sequence[Micro]], scopes: str | Sequence[str] = (), **changes: Any
) -> dict[str, Any]:
    """Trains in mode `eager` and with graphs, with the same bits; `changes` as in `run()`.

    Returns:
        The report of the graphs.
    """
    eager = run(graph_config(mode="eager", cuda_graph_modules=scopes), kinds, steps, **changes)
    graphed = run(graph_config(cuda_graph_modules=scopes), kinds, steps, **changes)
    assert_same_bits(eager, graphed)
    return graphed.report


def compare_runs(
    trainers: Sequence[ExpertTrainer], run_of: Callable[[ExpertTrainer, bool], Sequence[Any]]
) -> None:
    """Runs the first of two models eager and the other one with graphs, with the same bits.

    Args:
        trainers: of the same weights.
        run_of: runs one of them, eager or not, and returns what that has left.
    """
    found: list[Sequence[Any]] = []
    for trainer in trainers:
        metrics()
        found.append(run_of(trainer, trainer is trainers[0]))
    assert_same_bits(*found, "steps")


def compare_steps(trainers: Sequence[ExpertTrainer], steps: Sequence[Sequence[Micro]]) -> None:
    """Trains the first of two models eager and the other one with graphs, with the same bits."""
    compare_runs(
        trainers, lambda trainer, eager: [expert_step(trainer, micros, eager=eager) for micros in steps]
    )
