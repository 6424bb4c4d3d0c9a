# SPDX-License-Identifier: Apache-2.0
"""Where megatron-core is touched, and what each place must look like. The only file that knows a release.

A seam is checked by its signature when the plugin is installed; what is missing or changed is named
then, not in the middle of a run.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megagraph.log import log

__all__ = [
    "ATTENTION_ROPE",
    "BLOCK_FORWARD",
    "DESTROY_MODEL_PARALLEL",
    "DESTROY_PROCESS_GROUP",
    "DISPATCH_PREPROCESS",
    "EXPERT_BIAS",
    "EXPERT_CHOICE",
    "EXPERT_FORWARD",
    "EXPERT_PREPROCESS",
    "GPT_FORWARD",
    "HYBRID_FORWARD",
    "HYBRID_STACK_FORWARD",
    "LATENT_ATTENTION",
    "LATENT_ROPE",
    "MLP_FORWARD",
    "PACK_GROUPS",
    "PERMUTATION",
    "PERMUTED_ROWS",
    "ROUTING",
    "SAVING_GROUP",
    "SCHEDULES",
    "SUPPORTED",
    "Seam",
    "check_core",
    "is_replaced",
    "moe_metrics",
    "permutation_sorts",
    "replaced_choice",
    "replaced_rope",
]

# Releases that the tests run against. Others are tried, with a warning.
SUPPORTED = ("0.16.1", "0.19.2")


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One function of megatron-core that the plugin wraps or calls.

    Args:
        module: where it is looked up when it is called.
        path: dotted name in the module.
        parameters: names that its signature must have, in order as far as they are positional.
    """

    module: str
    path: str
    parameters: tuple[str, ...]

    def owner(self) -> Any:
        """The module or class that holds the function."""
        found: Any = importlib.import_module(self.module)
        for part in self.path.split(".")[:-1]:
            found = getattr(found, part)
        return found

    @property
    def name(self) -> str:
        """Its name in the owner."""
        return self.path.split(".")[-1]

    def function(self) -> Callable[..., Any]:
        """The function as the owner holds it now."""
        found: Callable[..., Any] = getattr(self.owner(), self.name)
        return found

    def is_present(self) -> bool:
        """Whether the installed release has the module that a seam of some releases lies in."""
        try:
            importlib.import_module(self.module)
        except ImportError:
            return False
        return True

    def problem(self) -> str | None:
        """What is wrong with this seam in the installed release, or None."""
        where = f"{self.module}.{self.path}"
        try:
            function = self.function()
        except (ImportError, AttributeError) as error:
            return f"{where} is missing ({error})"
        names = inspect.signature(function).parameters
        missing = [name for name in self.parameters if name not in names]
        return f"{where} has no parameter {', '.join(missing)}" if missing else None


_SCHEDULE_PARAMETERS = ("forward_step_func", "data_iterator", "model", "num_microbatches", "forward_only")
SCHEDULES = tuple(
    Seam(
        module="megatron.core.pipeline_parallel.schedules",
        path=f"forward_backward_{name}",
        parameters=_SCHEDULE_PARAMETERS,
    )
    for name in (
        "no_pipelining",
        "pipelining_without_interleaving",
        "pipelining_with_interleaving",
    )
)
GPT_FORWARD = Seam(
    module="megatron.core.models.gpt.gpt_model",
    path="GPTModel.forward",
    parameters=(
        "input_ids",
        "position_ids",
        "attention_mask",
        "decoder_input",
        "labels",
        "packed_seq_params",
    ),
)
BLOCK_FORWARD = Seam(
    module="megatron.core.transformer.transformer_block",
    path="TransformerBlock.forward",
    parameters=("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
)
# Of releases since 0.18; others are patched without them.
HYBRID_FORWARD = Seam(
    module="megatron.core.models.hybrid.hybrid_model",
    path="HybridModel.forward",
    parameters=GPT_FORWARD.parameters,
)
HYBRID_STACK_FORWARD = Seam(
    module="megatron.core.models.hybrid.hybrid_block",
    path="HybridStack.forward",
    parameters=("hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params"),
)
ATTENTION_ROPE = Seam(
    module="megatron.core.transformer.attention",
    path="apply_rotary_pos_emb",
    parameters=("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group"),
)
LATENT_ROPE = Seam(
    module="megatron.core.transformer.multi_latent_attention",
    path="apply_rotary_pos_emb",
    parameters=ATTENTION_ROPE.parameters,
)
# Says which modules make rotary tables of their own.
LATENT_ATTENTION = Seam(
    module="megatron.core.transformer.multi_latent_attention",
    path="MultiLatentAttention.forward",
    parameters=("hidden_states", "attention_mask", "packed_seq_params"),
)
# What it calls, by name in its own module. Our op has the bits of the release's own.
_ROPE_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_ROPE_PARTS = ("_apply_rotary_pos_emb_thd", "_apply_rotary_pos_emb_bshd")
_ROUTER_MODULE = "megatron.core.transformer.moe.router"
ROUTING = Seam(module=_ROUTER_MODULE, path="TopKRouter.routing", parameters=("logits", "padding_mask"))
EXPERT_BIAS = Seam(
    module=_ROUTER_MODULE,
    path="TopKRouter._apply_expert_bias",
    parameters=("routing_map", "padding_mask"),
)
_CHOICE_MODULE = "megatron.core.transformer.moe.moe_utils"  # where routers have it from
EXPERT_CHOICE = Seam(
    module=_ROUTER_MODULE, path="topk_routing_with_score_function", parameters=("logits", "topk")
)
# What is run in parts where a router is graphed.
MLP_FORWARD = Seam(
    module="megatron.core.transformer.transformer_layer",
    path="TransformerLayer._forward_mlp",
    parameters=("hidden_states", "padding_mask"),
)
EXPERT_FORWARD = Seam(
    module="megatron.core.transformer.moe.moe_layer",
    path="MoELayer.forward",
    parameters=("hidden_states", "padding_mask"),
)
# Module and attribute of a group that shards of experts are saved over, and no forward uses.
SAVING_GROUP = ("megatron.core.transformer.moe.experts", "dp_group")
EXPERT_PREPROCESS = Seam(
    module=EXPERT_FORWARD.module,
    path="MoELayer.preprocess",
    parameters=("hidden_states", "probs", "routing_map"),
)
_DISPATCHER_MODULE = "megatron.core.transformer.moe.token_dispatcher"
DISPATCH_PREPROCESS = Seam(
    module=_DISPATCHER_MODULE,
    path="MoEAlltoAllTokenDispatcher.dispatch_preprocess",
    parameters=("hidden_states", "routing_map", "probs"),
)
PERMUTED_ROWS = Seam(
    module=_DISPATCHER_MODULE,
    path="MoEAlltoAllTokenDispatcher.preprocess",
    parameters=("routing_map",),
)
PERMUTATION = Seam(
    module=_DISPATCHER_MODULE,
    path="permute",
    parameters=("tokens", "routing_map", "probs", "num_out_tokens", "fused", "drop_and_pad"),
)
# NCCL waits for ever for a communicator whose operations a living graph holds.
DESTROY_PROCESS_GROUP = Seam(module="torch.distributed", path="destroy_process_group", parameters=("group",))
DESTROY_MODEL_PARALLEL = Seam(
    module="megatron.core.parallel_state", path="destroy_model_parallel", parameters=()
)
# Asked for the groups over which ranks share a pack, by the names of `ProcessGroupCollection`.
PACK_GROUPS = {
    name: Seam(
        module="megatron.core.parallel_state",
        path=f"get_{words}_parallel_group",
        parameters=("check_initialized",),
    )
    for name, words in (
        ("tp", "tensor_model"),
        ("cp", "context"),
        ("tp_cp", "tensor_and_context"),
    )
}
# Called, not wrapped.
_CALLED = (
    *(LATENT_ATTENTION, MLP_FORWARD, EXPERT_FORWARD, EXPERT_PREPROCESS, DISPATCH_PREPROCESS),
    Seam(
        module="megatron.core.models.gpt.gpt_model",
        path="GPTModel._preprocess",
        parameters=("input_ids", "position_ids", "decoder_input", "packed_seq_params"),
    ),
    Seam(module="megatron.core.transformer.cuda_graphs", path="_set_capture_start", parameters=()),
    Seam(module="megatron.core.transformer.cuda_graphs", path="_set_capture_end", parameters=()),
    Seam(module="megatron.core.transformer.cuda_graphs", path="is_graph_capturing", parameters=()),
    Seam(module="megatron.core.tensor_parallel", path="get_cuda_rng_tracker", parameters=()),
)


def has_latent_attention(model: nn.Module) -> bool:
    """Whether any attention of a model is multi-latent, whatever its config says."""
    latent = LATENT_ATTENTION.owner()
    return any(isinstance(module, latent) for module in model.modules())


def _below_ours(function: Any) -> Any:
    """What a function of ours is wrapped around; any other function itself."""
    while _made_in(function).startswith("megagraph."):
        function = function.__wrapped__
    return function


def _made_in(function: Any) -> str:
    """The module that a function's code is of. Its `__module__` says less: decorators copy it."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _called(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def replaced_rope(seam: Seam) -> str | None:
    """The name of a function that a host has put in place of one of Megatron's unfused RoPE, or None.

    Args:
        seam: where the model's attention calls it.
    """
    own = vars(importlib.import_module(_ROPE_MODULE))
    for function in (_below_ours(seam.function()), *(own[name] for name in _ROPE_PARTS if name in own)):
        if getattr(function, "__globals__", None) is not own:
            return _called(function)
    return None


def replaced_choice() -> str | None:
    """The name of a function that a host has put in place of Megatron's choice of experts, or None."""
    function = _below_ours(EXPERT_CHOICE.function())
    return None if _made_in(function) == _CHOICE_MODULE else _called(function)


def is_replaced(module: Any, seam: Seam) -> bool:
    """Whether a module runs another method than Megatron's, or ours around it, under a seam's name."""
    method: Any = getattr(module, seam.name, None)
    function = getattr(method, "__func__", method)
    while (owner := _made_in(function)) != seam.module:
        # Ours, and Megatron's own decorators.
        if not owner.startswith(("megagraph.", "megatron.core.")) or not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def permutation_sorts() -> bool:
    """Whether Megatron sorts rows and returns five values; up to 0.16 a mask selects them, and it is 3."""
    return "tokens_per_expert" in inspect.signature(PERMUTATION.function()).parameters


@functools.cache
def _metrics_module() -> tuple[Any, bool]:
    """Where the metrics of experts are, and whether the module is theirs alone, as in later releases."""
    try:
        return importlib.import_module("megatron.core.transformer.moe.moe_logging"), True
    except ImportError:
        return importlib.import_module("megatron.core.transformer.moe.moe_utils"), False


def moe_metrics() -> Mapping[str, Tensor]:
    """Megatron's metrics of experts as they are now, by name, each [layers]."""
    module, is_own = _metrics_module()
    if not is_own:
        return {name: found["values"] for name, found in module.get_moe_layer_wise_logging_tracker().items()}
    return {name: found.values for name, found in module.get_moe_metrics_tracker().metrics.items()}


def check_core() -> str:
    """Checks every seam of the installed megatron-core.

    Returns:
        Its version.

    Raises:
        RuntimeError: where megatron-core is absent, or a seam does not fit, naming each.
    """
    try:
        version = str(importlib.import_module("megatron.core").__version__)
    except ImportError as error:
        raise RuntimeError(
            f"megagraph.install() needs megatron-core ({' or '.join(SUPPORTED)}), and it cannot be "
            f"imported: {error}"
        ) from error
    hybrid = (HYBRID_FORWARD, HYBRID_STACK_FORWARD) if HYBRID_FORWARD.is_present() else ()
    seams = (
        *(*SCHEDULES, GPT_FORWARD, BLOCK_FORWARD, ATTENTION_ROPE, LATENT_ROPE),
        *(ROUTING, EXPERT_CHOICE, EXPERT_BIAS, PERMUTED_ROWS, PERMUTATION),
        *(DESTROY_PROCESS_GROUP, DESTROY_MODEL_PARALLEL, *PACK_GROUPS.values(), *_CALLED, *hybrid),
    )
    problems = [problem for seam in seams if (problem := seam.problem()) is not None]
    if problems:
        raise RuntimeError(
            f"megatron-core {version} does not fit (supported: {', '.join(SUPPORTED)}): "
            + "; ".join(problems)
        )
    if version.split("+")[0] not in SUPPORTED:  # without the commit that core may append
        log.warning("megatron-core %s is untested (tested: %s); its seams fit", version, ", ".join(SUPPORTED))
    return version
