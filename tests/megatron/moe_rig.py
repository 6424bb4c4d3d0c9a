# SPDX-License-Identifier: Apache-2.0
"""Models with experts for the tests of the Megatron floor, and whole runs with all that they count."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron_rig import CAPACITY, OPTIONS, Micro, compare_runs, metrics, te_layer_spec
from torch import Tensor

from megagraph.demo.trainer import ModelOptions, Trainer
from megagraph.megatron.seams import permutation_sorts
from megagraph.megatron.specs import get_gpt_layer_varlen_spec, with_grouped_experts

Config = dict[str, Any]
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
CASES: dict[str, Config] = {
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

BIAS = CASES["sigmoid, bias, groups"]
GATED = CASES["gated shared experts, allgather"] | {"moe_token_dispatcher_type": "alltoall"}

_BESIDE_ATTENTION = ("alltoall", "allgather", "drop and pad", "drop", "sigmoid, bias, groups", "recomputed")
# Routers in graphs: all but what recomputes the router with its experts.
ROUTED: dict[str, Config] = {
    **{name: case for name, case in CASES.items() if name != "recomputed"},
    "shared experts, overlapped": {**CASES["shared experts"], "moe_shared_expert_overlap": True},
    "several losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.02, 0.01, 0.03],
        "moe_router_dtype": "fp32",
    },
    "one expert, before the choice, in doubles": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp64",
        "moe_router_topk_scaling_factor": 2.5,
    },
    "groups, no losses": {
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
    },
    "jitter, drop, gated shared experts": {**CASES["jitter"], **DROPS, **GATED},
}

# Rows permuted in the router's graph: all but what drops tokens before it permutes (R12).
_DROP = ("drop", "jitter, drop, gated shared experts")
PERMUTED: dict[str, Config] = {
    **{name: case for name, case in ROUTED.items() if name not in _DROP},
    "drop and pad, shared experts": {**ROUTED["drop and pad"], **ROUTED["shared experts"]},
}

# Whole layers whose experts are padded to a capacity.
_PADDED = CASES["drop and pad"]
PADDED: dict[str, Config] = {
    "padded": _PADDED,
    "by position": {**_PADDED, "moe_token_drop_policy": "position"},
    "room for all": {**_PADDED, "moe_expert_capacity_factor": 2.0},
    "sigmoid, bias, groups": {**BIAS, **_PADDED},
    "several losses": {**ROUTED["several losses"], **_PADDED},
    "jitter": {**CASES["jitter"], **_PADDED},
    "gated shared experts": {**_PADDED, **GATED},
    "recomputed": {
        **BIAS,
        **_PADDED,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
}

# Whole layers of grouped experts.
_TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
_SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
GROUPED: dict[str, Config] = {
    "top 1": _TOP_1,
    "top 2": {},
    "top 4 of 4": {"moe_router_topk": 4},
    "swiglu": _SWIGLU,
    "on the input": {**_TOP_1, "moe_apply_probs_on_input": True},
    **{name: CASES[name] for name in ("shared experts", "gated shared experts, allgather")},
    **{name: CASES[name] for name in ("global loss, per token", "jitter")},
    "sigmoid, bias, groups": BIAS,
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "gradients of their own": {"gradient_accumulation_fusion": False, "moe_router_dtype": "fp32"},
}
# Compiled, for which the CPU takes minutes.
GROUPED_ON_GPU: dict[str, Config] = {"fused swiglu": {**_SWIGLU, "bias_activation_fusion": True}}


class Way(NamedTuple):
    """A way to graph layers of experts: what is named, and the models."""

    scopes: str | tuple[str, ...]
    cases: dict[str, Config]


ATTENTION, ROUTERS, PERMUTATION = "attention", "attention, routers", "attention, routers, permutation"
PADDED_EXPERTS, GROUPED_EXPERTS = "padded experts", "grouped experts"
BIASED = "sigmoid, bias, groups"
WAYS = {
    # Beside attention experts are eager, whatever they are.
    ATTENTION: Way("attn", {name: CASES[name] for name in _BESIDE_ATTENTION}),
    ROUTERS: Way(("attn", "moe_router"), ROUTED),
    PERMUTATION: Way(("attn", "moe_router", "moe_preprocess"), PERMUTED),
    PADDED_EXPERTS: Way(("attn", "moe"), PADDED),
    GROUPED_EXPERTS: Way((), {**GROUPED, **GROUPED_ON_GPU}),
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


def block_spec(
    kinds: str,  # `E` for a layer of experts, `-` for a dense one
    *,
    engine: bool = False,  # of Transformer Engine's modules
    is_grouped: bool | None = None,
    num_experts: int = EXPERTS,  # of each layer that has any
    **attention: Any,  # further arguments of each layer's spec
) -> Any:
    """The spec of a block."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    make = te_layer_spec if engine else get_gpt_layer_varlen_spec
    is_grouped = engine if is_grouped is None else is_grouped
    layers = {
        "E": make(num_experts=num_experts, moe_grouped_gemm=is_grouped, **attention),
        "-": make(**attention),
    }
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm as Norm
    else:
        Norm = layers["-"].submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in kinds], layer_norm=Norm)


def grouped_spec(kinds: str) -> Any:
    """Of a block whose experts never wait for the device."""
    return with_grouped_experts(block_spec(kinds))


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

        counts = (router.local_tokens_per_expert for router in routers(self))
        self.counts = [each.clone() for each in counts if each is not None]
        finalize_model_grads(*args, **kwargs)

    def counted(self) -> dict[str, Any]:
        """What a step has left in its layers of experts."""
        bias = [router.expert_bias.clone() for router in routers(self) if router.expert_bias is not None]
        return {"metrics": metrics(), "counts": self.counts, "bias": bias}


def grouped_trainer(kinds: str = "EE", **changes: Any) -> ExpertTrainer:
    """A model whose experts never wait for the device."""
    return ExpertTrainer(kinds, spec=grouped_spec(kinds), **changes)


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


def compare(
    kinds: str, steps: Sequence[Sequence[Micro]], scopes: str | Sequence[str] = (), **given: Any
) -> dict[str, Any]:
    """Trains layers of these kinds eager and graphed, with the same bits. Returns the report."""
    return compare_runs(steps, ExpertTrainer, {"cuda_graph_modules": scopes}, kinds=kinds, **given).report


def can_permute(case: Config) -> bool:
    """Whether this release can permute inside of a graph."""
    is_padded = case.get("moe_pad_expert_input_to_capacity", False)
    return permutation_sorts() or is_padded or case.get("moe_token_dispatcher_type") == "allgather"
