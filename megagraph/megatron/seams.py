# SPDX-License-Identifier: Apache-2.0
"""Where megatron-core is touched, and what each place must look like. The only module that knows a release.

A seam is checked by its signature when the plugin is installed; what is missing or changed is named then, not
in the middle of a run.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

__all__ = [
    *("ATTENTION_ROPE", "BLOCK_FORWARD", "DATA_AND_CONTEXT_GROUP", "DESTROY_MODEL_PARALLEL"),
    *("DESTROY_PROCESS_GROUP", "DISPATCH_PREPROCESS", "ENGINE_ATTENTION", "EXPERT_BIAS", "EXPERT_CHOICE"),
    *("EXPERT_FORWARD", "EXPERT_PREPROCESS", "FUSED_ROPE", "GPT_FORWARD", "GPT_PLAN", "HYBRID_FORWARD"),
    *("HYBRID_STACK_FORWARD", "KEPT_BY_STACKS", "LAYER_FORWARD", "MAMBA_FORWARD", "MIXER_DOCUMENTS"),
    *("MLA_ATTENTION", "MLA_KEY_ROPE", "MLA_QUERY_ROPE", "MLA_ROPE", "MLP_FORWARD", "MODEL_INIT"),
    *("PACKED_ROPE", "PACKED_SEQ_PARAMS", "PACK_GROUPS", "PERMUTATION", "PERMUTED_ROWS", "PLANNED_STEP"),
    *("PREDICTION_FORWARD", "RNG_TRACKER", "ROUTER_FORWARD", "ROUTING", "ROWS_ROPE", "SAVING_GROUP"),
    *("SCHEDULES", "STAGE_GROUP", "SUPPORTED", "YARN_EMBEDDING", "Seam", "as_before", "called_name"),
    *("check_core", "has_engine", "has_mla", "hybrid_groups", "hybrid_seams", "inference_flag"),
    *("is_replaced", "made_in", "misfits", "moe_metrics", "moe_records", "nodes_of", "packs_have"),
    *("permutation_sorts", "plans_free_what_one_expert_reads", "replaced_choice", "replaced_rope"),
    *("router_losses_count_ranks", "stand_in", "unfit"),
]

# Releases that the tests run against. Others are tried, with a warning.
SUPPORTED = ("0.16.1", "0.19.2")


@dataclass(frozen=True)
class Seam:
    """One function of megatron-core that the plugin wraps or calls."""

    module: str  # in which it is looked up when it is called
    path: str  # dotted name in the module
    takes: str = ""  # names that its signature must have, with blanks between

    def owner(self) -> Any:
        """The module or class that holds the function."""
        return pkgutil.resolve_name(f"{self.module}:{self.path.rpartition('.')[0]}")

    @property
    def name(self) -> str:
        """Its name in the owner."""
        return self.path.split(".")[-1]

    def function(self) -> Callable[..., Any]:
        """The function as the owner holds it now."""
        found: Callable[..., Any] = getattr(self.owner(), self.name)
        return found

    def problem(self) -> str | None:
        """What is wrong with this seam, in the release or by what a host has put there; or None."""
        name = f"{self.module}.{self.path}"
        try:
            missing = self.missing_in(self.function())
        except (ImportError, AttributeError) as error:
            return f"{name} is missing ({error})"
        return f"{name} has no parameter {missing}" if missing else None

    def missing_in(self, function: Callable[..., Any]) -> str:
        """Which names a function's signature lacks, unless it takes any."""
        parameters = inspect.signature(function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return ""
        return ", ".join(name for name in self.takes.split() if name not in parameters)


def stand_in(owner: Any, **values: Any) -> contextlib.ExitStack:
    """Puts values in the place of attributes, own or inherited ones, until what it returns is closed."""
    own, put_back = vars(owner), contextlib.ExitStack()
    put: Callable[[str, Any], None] = functools.partial(setattr, owner)
    remove: Callable[[str], None] = functools.partial(delattr, owner)
    if isinstance(own, dict):  # of an instance, where torch's modules look at each value
        put, remove = own.__setitem__, own.__delitem__
    for name, value in values.items():
        if name in own:
            put_back.callback(put, name, own[name])
        else:
            put_back.callback(remove, name)
        put(name, value)
    return put_back


@contextlib.contextmanager
def as_before(*owned: MutableMapping[Any, Any]) -> Iterator[None]:
    """Puts back what dictionaries held, in its order, whatever happens inside: attributes, or hooks.

    Attributes may be added inside, or get other values.
    """
    before = [dict(each) for each in owned]
    try:
        yield
    finally:
        for now, held in zip(owned, before, strict=True):
            for name in now.keys() - held.keys():
                del now[name]
            if [*now] != [*held]:  # never of attributes: another thread may need one at this moment
                now.clear()
            now.update(held)


# -- schedules and models ------------------------------------------------------------------------

SCHEDULES = tuple(
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        f"forward_backward_{name}",
        "forward_step_func data_iterator model num_microbatches forward_only",
    )
    for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
)
_GPT = "megatron.core.models.gpt.gpt_model"
_OF_MODELS = "input_ids position_ids attention_mask decoder_input labels packed_seq_params"
_OF_BLOCKS = "hidden_states attention_mask rotary_pos_emb packed_seq_params"
MODEL_INIT = Seam("megatron.core.models.common.language_module.language_module", "LanguageModule.__init__")
GPT_FORWARD = Seam(_GPT, "GPTModel.forward", _OF_MODELS)
# Asked in place of the forward under expert-parallel overlap.
GPT_PLAN = Seam(_GPT, "GPTModel.build_schedule_plan", f"{_OF_MODELS} padding_mask")
PLANNED_STEP = Seam("megatron.core.pipeline_parallel.combined_1f1b", "combined_forward_backward_step")
BLOCK_FORWARD = Seam("megatron.core.transformer.transformer_block", "TransformerBlock.forward", _OF_BLOCKS)
# Hybrid models since 0.18.
HYBRID_FORWARD = Seam("megatron.core.models.hybrid.hybrid_model", "HybridModel.forward", _OF_MODELS)
HYBRID_STACK_FORWARD = Seam("megatron.core.models.hybrid.hybrid_block", "HybridStack.forward", _OF_BLOCKS)
# The same before 0.18; later releases derive these names from the others.
MAMBA_FORWARD = Seam("megatron.core.models.mamba.mamba_model", "MambaModel.forward", _OF_MODELS)
_MAMBA_STACK_FORWARD = Seam("megatron.core.ssm.mamba_block", "MambaStack.forward", _OF_BLOCKS)
# Arguments that such a stack hands to a `TransformerLayer` alone, which nothing in its place is.
KEPT_BY_STACKS = ("rotary_pos_emb", "padding_mask")
# If a pack has no `seq_idx` each mixer makes it.
MIXER_DOCUMENTS = Seam(
    "megatron.core.ssm.mamba_mixer", "MambaMixer._create_packed_seq_idx", "packed_seq_params total_tokens"
)
# Predicts further tokens from what the block has left.
PREDICTION_FORWARD = Seam(
    "megatron.core.transformer.multi_token_prediction",
    "MultiTokenPredictionBlock.forward",
    "hidden_states rotary_pos_emb packed_seq_params",
)
PACKED_SEQ_PARAMS = Seam(
    "megatron.core.packed_seq_params",
    "PackedSeqParams",
    "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q "
    "max_seqlen_kv local_cp_size cp_group",
)
_IS_CAPTURING = Seam("megatron.core.transformer.cuda_graphs", "is_graph_capturing")
# Asked for the tracker of random streams, which may be replaced at any time.
RNG_TRACKER = Seam("megatron.core.tensor_parallel", "get_cuda_rng_tracker")


def hybrid_seams() -> tuple[Seam, Seam] | None:
    """The forwards of hybrid models and of their stacks of layers; None if neither can be imported."""
    for pair in ((HYBRID_FORWARD, HYBRID_STACK_FORWARD), (MAMBA_FORWARD, _MAMBA_STACK_FORWARD)):
        with contextlib.suppress(ImportError):
            importlib.import_module(pair[0].module)
            return pair
    return None


def packs_have(field: str) -> bool:
    """Whether the release's packs can say something, such as `seq_idx`, the document of each row."""
    return field in inspect.signature(PACKED_SEQ_PARAMS.function()).parameters


# -- attention -----------------------------------------------------------------------------------

_MLA = "megatron.core.transformer.multi_latent_attention"
_OF_ROPE = "t freqs config cu_seqlens mscale cp_group"
ATTENTION_ROPE = Seam("megatron.core.transformer.attention", "apply_rotary_pos_emb", _OF_ROPE)
MLA_ROPE = Seam(_MLA, "apply_rotary_pos_emb", _OF_ROPE)
# Its fused RoPE of queries, and of keys with values: kernels of Triton, which need a GPU to run.
MLA_QUERY_ROPE = Seam(
    _MLA, "fused_apply_mla_rope_for_q", "t cos sin qk_head_dim emb_dim cu_seqlens_q cp_rank cp_size"
)
MLA_KEY_ROPE = Seam(
    _MLA,
    "fused_apply_mla_rope_for_kv",
    "kv k_pos_emb cos sin emb_dim k_dim v_dim cu_seqlens_kv cp_rank cp_size",
)
# Says which modules make rotary tables of their own.
MLA_ATTENTION = Seam(_MLA, "MultiLatentAttention.forward", "hidden_states attention_mask packed_seq_params")
_EMBEDDINGS = "megatron.core.models.common.embeddings"
YARN_EMBEDDING = Seam(f"{_EMBEDDINGS}.yarn_rotary_pos_embedding", "YarnRotaryEmbedding.get_cached_cos_sin")
# What RoPE calls, by name in its own module, whoever has imported that: of packs, and of rows that have
# frequencies of their own. Our op has the bits of the release's own.
_ROPE = f"{_EMBEDDINGS}.rope_utils"
PACKED_ROPE = Seam(
    _ROPE, "_apply_rotary_pos_emb_thd", "t cu_seqlens freqs rotary_interleaved mscale cp_group"
)
ROWS_ROPE = Seam(_ROPE, "_apply_rotary_pos_emb_bshd")
# Transformer Engine's; None without one.
FUSED_ROPE = Seam(_ROPE, "fused_apply_rotary_pos_emb_thd", "t cu_seqlens freqs cp_size cp_rank")
ENGINE_ATTENTION = Seam(
    "megatron.core.extensions.transformer_engine",
    "TEDotProductAttention.forward",
    "query key value attention_mask packed_seq_params",
)


def has_mla(model: nn.Module) -> bool:
    """Whether any attention of a model is multi-latent, whatever its config says."""
    mla = MLA_ATTENTION.owner()
    return any(isinstance(module, mla) for module in model.modules())


def replaced_rope(*, is_mla: bool, is_fused: bool) -> str | None:
    """The name of a host's function in place of one of Megatron's RoPE that our ops reproduce, or None."""
    if is_fused and not is_mla:
        return None  # Transformer Engine's, which stays
    module, seams = _ROPE, [MLA_ROPE if is_mla else ATTENTION_ROPE, PACKED_ROPE, ROWS_ROPE]
    if is_fused:
        module, seams = "megatron.core.fusions.fused_mla_yarn_rope_apply", [MLA_QUERY_ROPE, MLA_KEY_ROPE]
    functions = (_below(seam.function(), "megagraph.") for seam in seams)
    return next((called_name(function) for function in functions if made_in(function) != module), None)


def inference_flag() -> Callable[[], bool]:
    """Asks whether an engine of inference uses models, which Megatron itself knows since 0.19."""
    mode = getattr(importlib.import_module(_GPT), "InferenceMode", None)
    return bool if mode is None else mode.is_active


@functools.cache
def has_engine() -> bool:
    """Whether Transformer Engine is there; if it is not, Megatron has stand-ins instead."""
    with contextlib.suppress(ValueError):  # a host's stand-in, without a spec
        if importlib.util.find_spec("transformer_engine") is not None:
            return bool(importlib.import_module(ENGINE_ATTENTION.module).HAVE_TE)
    return False


# -- experts -------------------------------------------------------------------------------------

_ROUTERS, _DISPATCHERS, _MOE_UTILS, _MOE_LAYERS = (
    f"megatron.core.transformer.moe.{name}"
    for name in ("router", "token_dispatcher", "moe_utils", "moe_layer")
)
# What routers that are told what to choose are called through.
ROUTER_FORWARD = Seam(_ROUTERS, "TopKRouter.forward", "input padding_mask")
ROUTING = Seam(_ROUTERS, "TopKRouter.routing", "logits padding_mask")
_ROUTER_LOSSES = Seam(
    _ROUTERS, "TopKRouter.attach_and_log_load_balancing_loss", "activation aux_loss_coeff aux_loss"
)
EXPERT_BIAS = Seam(_ROUTERS, "TopKRouter._apply_expert_bias", "routing_map padding_mask")
EXPERT_CHOICE = Seam(_ROUTERS, "topk_routing_with_score_function", "logits topk")
# What runs the halves of a layer.
LAYER_FORWARD = Seam("megatron.core.transformer.transformer_layer", "TransformerLayer.forward")
# What is run in parts if a router is graphed.
MLP_FORWARD = Seam(LAYER_FORWARD.module, "TransformerLayer._forward_mlp", "hidden_states padding_mask")
EXPERT_FORWARD = Seam(_MOE_LAYERS, "MoELayer.forward", "hidden_states padding_mask")
EXPERT_PREPROCESS = Seam(_MOE_LAYERS, "MoELayer.preprocess", "hidden_states probs routing_map")
DISPATCH_PREPROCESS = Seam(
    _DISPATCHERS, "MoEAlltoAllTokenDispatcher.dispatch_preprocess", "hidden_states routing_map probs"
)
PERMUTED_ROWS = Seam(_DISPATCHERS, "MoEAlltoAllTokenDispatcher.preprocess", "routing_map")
PERMUTATION = Seam(_DISPATCHERS, "permute", "tokens routing_map probs num_out_tokens fused drop_and_pad")


def replaced_choice() -> str | None:
    """The name of a function that a host has put in place of Megatron's choice of experts, or None."""
    function = _below(EXPERT_CHOICE.function(), "megagraph.")
    return None if made_in(function) == _MOE_UTILS else called_name(function)


def permutation_sorts() -> bool:
    """Whether Megatron sorts rows and returns five values; up to 0.16 a mask selects them, and it is 3."""
    return "tokens_per_expert" in inspect.signature(PERMUTATION.function()).parameters


def nodes_of(plan: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Each layer of a schedule plan, with its node up to the dispatch, that of its MLP, and its last one.

    The first is that of attention up to 0.16; the last is that of the MLP where nothing is combined.
    """
    for index in range(plan.num_layers()):
        of_layer = plan.get_layer(index)
        first = getattr(of_layer, "pre_dispatch_computation", None) or of_layer.attn
        last = of_layer.moe_combine if hasattr(of_layer.moe_combine, "submodule") else of_layer.mlp
        yield of_layer.layer, first, of_layer.mlp, last


@functools.cache
def plans_free_what_one_expert_reads() -> bool:
    """Whether nodes free the rows of a rank with one expert before its backward, which raises: up to 0.16."""
    module = importlib.import_module("megatron.core.models.gpt.fine_grained_callables")
    frees = getattr(module, "should_free_input", None)
    return frees is not None and "num_local_experts" not in inspect.signature(frees).parameters


@functools.cache
def router_losses_count_ranks() -> bool:
    """Whether a router's losses per token are multiplied by the number of ranks that share a pack.

    Up to 0.16 they are not: each rank adds its part of the tokens times its part of the loss.
    """
    return "tp_cp_group" in inspect.unwrap(_ROUTER_LOSSES.function()).__code__.co_names


def moe_records() -> Mapping[str, dict[str, Any]]:
    """What Megatron keeps of its metrics of experts, by name, to read and to write: an object's attributes.

    Up to 0.16 a dictionary. `reduce_group` is the group over which one is added up; None or absent for none.
    """
    utils = importlib.import_module(_MOE_UTILS)
    if not hasattr(utils, "get_moe_metrics_tracker"):
        tracked: Mapping[str, dict[str, Any]] = utils.get_moe_layer_wise_logging_tracker()
        return tracked
    return {name: vars(metric) for name, metric in utils.get_moe_metrics_tracker().metrics.items()}


def moe_metrics() -> Mapping[str, Tensor]:
    """Megatron's metrics of experts as they are now, by name, each [layers]."""
    return {name: record["values"] for name, record in moe_records().items()}


# -- process groups ------------------------------------------------------------------------------

_STATE = "megatron.core.parallel_state"
# NCCL waits for ever for a communicator whose operations a living graph holds.
DESTROY_PROCESS_GROUP = Seam("torch.distributed", "destroy_process_group", "group")
DESTROY_MODEL_PARALLEL = Seam(_STATE, "destroy_model_parallel")
# Asked for the groups over which ranks share a pack, by the names of `ProcessGroupCollection`.
PACK_GROUPS = {
    name: Seam(_STATE, f"get_{words}_parallel_group", "check_initialized")
    for name, words in (("tp", "tensor_model"), ("cp", "context"), ("tp_cp", "tensor_and_context"))
}
# Asked for the ranks that share a global batch, and for these of all tensor-parallel ranks.
DATA_AND_CONTEXT_GROUP = Seam(_STATE, "get_data_parallel_group", "with_context_parallel")
STAGE_GROUP = Seam(_STATE, "get_tensor_and_data_parallel_group", "check_initialized with_context_parallel")
_HYBRID_GROUPS = Seam(_STATE, "get_hybrid_data_context_parallel_groups", "check_initialized group_size")
# Module and attribute of a group that shards of experts are saved over, and no forward uses.
SAVING_GROUP = ("megatron.core.transformer.moe.experts", "dp_group")


def hybrid_groups(cp_sizes: Collection[int]) -> Sequence[Any]:
    """This rank's groups of Megatron's hybrid context parallelism of some sizes, as far as it has any.

    Its packs name them; that of all ranks is the one of data and context parallelism. Some may be destroyed.
    """
    ask, found = _HYBRID_GROUPS.function(), []
    for size in cp_sizes:
        with contextlib.suppress(KeyError):
            found.append(ask(check_initialized=False, group_size=size))
    return found


# -- what a host may have put in a seam's place --------------------------------------------------


def _below(function: Any, *wrappers: str) -> Any:
    """What a function is wrapped around by packages, such as ours; any other function itself."""
    return inspect.unwrap(function, stop=lambda it: not made_in(it).startswith(wrappers))


def made_in(function: Any) -> str:
    """The module that a function's code is of. Its `__module__` says less: decorators copy it."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def called_name(function: Any) -> str:
    """Its name and its module's."""
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def is_replaced(module: Any, seam: Seam) -> bool:
    """Whether a module runs another method than Megatron's, or ours around it, under a seam's name."""
    method: Any = getattr(module, seam.name, None)
    function = getattr(method, "__func__", method)
    # Below ours, and Megatron's own decorators.
    return made_in(_below(function, "megagraph.", "megatron.core.")) != seam.module


# -- the installed release -----------------------------------------------------------------------

_OF_ALL_MODELS = (
    *(*SCHEDULES, GPT_FORWARD, BLOCK_FORWARD, PACKED_SEQ_PARAMS, ATTENTION_ROPE, PACKED_ROPE, ROWS_ROPE),
    *(_IS_CAPTURING, RNG_TRACKER, DESTROY_PROCESS_GROUP, DESTROY_MODEL_PARALLEL, *PACK_GROUPS.values()),
    *(DATA_AND_CONTEXT_GROUP, STAGE_GROUP, _HYBRID_GROUPS),
)
_OF_SOME_MODELS = (
    *(PREDICTION_FORWARD, MLA_ROPE, MLA_QUERY_ROPE, MLA_KEY_ROPE, MLA_ATTENTION, MLP_FORWARD),
    *(ROUTER_FORWARD, ROUTING, _ROUTER_LOSSES, EXPERT_CHOICE, EXPERT_BIAS, PERMUTED_ROWS, PERMUTATION),
    *(EXPERT_FORWARD, EXPERT_PREPROCESS, DISPATCH_PREPROCESS, GPT_PLAN, PLANNED_STEP),
)


def _of_some_models() -> Sequence[Seam]:
    hybrid = hybrid_seams() or ()
    documents = (MIXER_DOCUMENTS,) if hybrid and not packs_have("seq_idx") else ()
    return (*_OF_SOME_MODELS, *hybrid, *documents, *((ENGINE_ATTENTION,) if has_engine() else ()))


def misfits() -> list[str]:
    """What is wrong with seams in the installed release, or by what a host has put there."""
    return _problems((*_OF_ALL_MODELS, *_of_some_models()))


def _problems(seams: Iterable[Seam]) -> list[str]:
    return [problem for seam in seams if (problem := seam.problem()) is not None]


def unfit(model: nn.Module) -> str | None:
    """What is wrong with a seam that a model needs which holds something of its module, and others do not."""
    problems = {seam.module: problem for seam in _of_some_models() if (problem := seam.problem()) is not None}
    held = [it for module in model.modules() if problems for it in (module, *vars(module).values())]
    homes = {cls.__module__ for it in held for cls in type(it).__mro__}
    return next((problem for home, problem in problems.items() if home in homes), None)


def check_core() -> str:
    """Checks the seams of the installed megatron-core, and returns its version.

    What a host has put in the place of one that only some models need keeps these eager: `unfit()`.

    Raises:
        RuntimeError: if megatron-core is absent, or a seam does not fit, naming each.
    """
    try:
        version = str(importlib.import_module("megatron.core").__version__)
    except ImportError as error:
        raise RuntimeError(
            f"megagraph.install() needs megatron-core ({' or '.join(SUPPORTED)}), and it cannot be "
            f"imported: {error}"
        ) from error
    problems = _problems(_OF_ALL_MODELS)
    # Of a core that does not fit nobody can ask which others there should be.
    problems = problems or _problems(replace(seam, takes="") for seam in _of_some_models())
    if problems:
        raise RuntimeError(
            f"megatron-core {version} does not fit (supported: {', '.join(SUPPORTED)}): "
            + "; ".join(problems)
        )
    return version
