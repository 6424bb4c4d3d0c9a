# SPDX-License-Identifier: Apache-2.0
"""Schedules, models, attention and process groups.

Among them hybrid models, which releases call by other names, and modules of Transformer Engine, where it is
installed.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph.megatron.seams.seam import Seam, below_ours, called_name

__all__ = [
    "ATTENTION_ROPE",
    "BLOCK_FORWARD",
    "DATA_AND_CONTEXT_GROUP",
    "DESTROY_MODEL_PARALLEL",
    "DESTROY_PROCESS_GROUP",
    "ENGINE_ATTENTION",
    "GPT_FORWARD",
    "HYBRID_FORWARD",
    "HYBRID_STACK_FORWARD",
    "MAMBA_FORWARD",
    "MAMBA_STACK_FORWARD",
    "MIXER_DOCUMENTS",
    "MLA_ATTENTION",
    "MLA_KEY_ROPE",
    "MLA_QUERY_ROPE",
    "MLA_ROPE",
    "MODEL_SEAMS",
    "PACKED_SEQ_PARAMS",
    "PACK_GROUPS",
    "PREDICTION_FORWARD",
    "SCHEDULES",
    "STAGE_GROUP",
    "engine_seams",
    "has_mla",
    "hybrid_groups",
    "hybrid_seams",
    "is_engine_attention",
    "packs_say_documents",
    "replaced_mla_rope",
    "replaced_rope",
    "static_group",
]


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
# Predicts further tokens from what the block has left.
PREDICTION_FORWARD = Seam(
    module="megatron.core.transformer.multi_token_prediction",
    path="MultiTokenPredictionBlock.forward",
    parameters=("hidden_states", "rotary_pos_emb", "packed_seq_params"),
)
ATTENTION_ROPE = Seam(
    module="megatron.core.transformer.attention",
    path="apply_rotary_pos_emb",
    parameters=("t", "freqs", "config", "cu_seqlens", "mscale", "cp_group"),
)
MLA_ROPE = Seam(
    module="megatron.core.transformer.multi_latent_attention",
    path="apply_rotary_pos_emb",
    parameters=ATTENTION_ROPE.parameters,
)
# Its fused RoPE of queries, and of keys with values: kernels of Triton, which need a GPU to run.
MLA_QUERY_ROPE = Seam(
    module="megatron.core.transformer.multi_latent_attention",
    path="fused_apply_mla_rope_for_q",
    parameters=("t", "cos", "sin", "qk_head_dim", "emb_dim", "cu_seqlens_q", "cp_rank", "cp_size"),
)
MLA_KEY_ROPE = Seam(
    module="megatron.core.transformer.multi_latent_attention",
    path="fused_apply_mla_rope_for_kv",
    parameters=(
        *("kv", "k_pos_emb", "cos", "sin", "emb_dim", "k_dim", "v_dim", "cu_seqlens_kv"),
        *("cp_rank", "cp_size"),
    ),
)
_MLA_ROPE_MODULE = "megatron.core.fusions.fused_mla_yarn_rope_apply"
# Says which modules make rotary tables of their own.
MLA_ATTENTION = Seam(
    module="megatron.core.transformer.multi_latent_attention",
    path="MultiLatentAttention.forward",
    parameters=("hidden_states", "attention_mask", "packed_seq_params"),
)
# What it calls, by name in its own module. Our op has the bits of the release's own.
_ROPE_MODULE = "megatron.core.models.common.embeddings.rope_utils"
_ROPE_PARTS = ("_apply_rotary_pos_emb_thd", "_apply_rotary_pos_emb_bshd")
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
# Asked for the ranks that share a global batch, and for these of all tensor-parallel ranks.
DATA_AND_CONTEXT_GROUP = Seam(
    module="megatron.core.parallel_state",
    path="get_data_parallel_group",
    parameters=("with_context_parallel",),
)
STAGE_GROUP = Seam(
    module="megatron.core.parallel_state",
    path="get_tensor_and_data_parallel_group",
    parameters=("check_initialized", "with_context_parallel"),
)
_HYBRID_GROUPS = Seam(
    module="megatron.core.parallel_state",
    path="get_hybrid_data_context_parallel_groups",
    parameters=("check_initialized", "group_size"),
)
PACKED_SEQ_PARAMS = Seam(
    module="megatron.core.packed_seq_params",
    path="PackedSeqParams",
    parameters=(
        "qkv_format",
        *(f"cu_seqlens_{of}{kind}" for kind in ("", "_padded") for of in ("q", "kv")),
        *("max_seqlen_q", "max_seqlen_kv", "local_cp_size", "cp_group"),
    ),
)
# Called, not wrapped.
_CALLED = (
    MLA_ATTENTION,
    PACKED_SEQ_PARAMS,
    DATA_AND_CONTEXT_GROUP,
    STAGE_GROUP,
    _HYBRID_GROUPS,
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
MODEL_SEAMS = (
    *(*SCHEDULES, GPT_FORWARD, BLOCK_FORWARD, PREDICTION_FORWARD, ATTENTION_ROPE, MLA_ROPE),
    *(MLA_QUERY_ROPE, MLA_KEY_ROPE),
    *(DESTROY_PROCESS_GROUP, DESTROY_MODEL_PARALLEL, *PACK_GROUPS.values(), *_CALLED),
)


def has_mla(model: nn.Module) -> bool:
    """Whether any attention of a model is multi-latent, whatever its config says."""
    mla = MLA_ATTENTION.owner()
    return any(isinstance(module, mla) for module in model.modules())


def hybrid_groups(cp_sizes: Collection[int]) -> Mapping[int, Any]:
    """This rank's groups of Megatron's hybrid context parallelism, as far as it has any: by size.

    Its packs name them; that of all ranks is the one of data and context parallelism. Some may be destroyed.

    Args:
        cp_sizes: how many ranks may share a pack.
    """
    ask, found = _HYBRID_GROUPS.function(), {}
    for size in cp_sizes:
        with contextlib.suppress(KeyError):
            found[size] = ask(check_initialized=False, group_size=size)
    return found


def static_group() -> Mapping[int, Any]:
    """This rank's group of Megatron's context parallelism that is the same for all packs, by its size."""
    group = PACK_GROUPS["cp"].function()(check_initialized=False)
    return {} if group is None else {group.size(): group}


def replaced_rope(seam: Seam) -> str | None:
    """The name of a function that a host has put in place of one of Megatron's unfused RoPE, or None.

    Args:
        seam: where the model's attention calls it.
    """
    own = vars(importlib.import_module(_ROPE_MODULE))
    for function in (below_ours(seam.function()), *(own[name] for name in _ROPE_PARTS if name in own)):
        if getattr(function, "__globals__", None) is not own:
            return called_name(function)
    return None


def replaced_mla_rope() -> str | None:
    """The name of a function that a host has put in place of one of Megatron's fused MLA RoPE, or None."""
    own = vars(importlib.import_module(_MLA_ROPE_MODULE))
    for seam in (MLA_QUERY_ROPE, MLA_KEY_ROPE):
        function = below_ours(seam.function())
        if getattr(function, "__globals__", None) is not own:
            return called_name(function)
    return None


# Of releases since 0.18.
HYBRID_FORWARD = Seam(
    module="megatron.core.models.hybrid.hybrid_model",
    path="HybridModel.forward",
    parameters=GPT_FORWARD.parameters,
)
HYBRID_STACK_FORWARD = Seam(
    module="megatron.core.models.hybrid.hybrid_block",
    path="HybridStack.forward",
    parameters=BLOCK_FORWARD.parameters,
)
# The same before 0.18; later releases derive these names from the others.
MAMBA_FORWARD = Seam(
    module="megatron.core.models.mamba.mamba_model",
    path="MambaModel.forward",
    parameters=GPT_FORWARD.parameters,
)
MAMBA_STACK_FORWARD = Seam(
    module="megatron.core.ssm.mamba_block",
    path="MambaStack.forward",
    parameters=HYBRID_STACK_FORWARD.parameters,
)
# Where a pack has no `seq_idx` each mixer makes it.
MIXER_DOCUMENTS = Seam(
    module="megatron.core.ssm.mamba_mixer",
    path="MambaMixer._create_packed_seq_idx",
    parameters=("packed_seq_params", "total_tokens"),
)


def hybrid_seams() -> tuple[Seam, Seam] | None:
    """The forwards of hybrid models and of their stacks of layers; None where neither can be imported."""
    pairs = ((HYBRID_FORWARD, HYBRID_STACK_FORWARD), (MAMBA_FORWARD, MAMBA_STACK_FORWARD))
    return next((pair for pair in pairs if pair[0].is_present()), None)


def packs_say_documents() -> bool:
    """Whether the release's packs have `seq_idx`, the document of each row."""
    packs: Any = importlib.import_module("megatron.core.packed_seq_params")
    return "seq_idx" in inspect.signature(packs.PackedSeqParams).parameters


ENGINE_ATTENTION = Seam(
    module="megatron.core.extensions.transformer_engine",
    path="TEDotProductAttention.forward",
    parameters=("query", "key", "value", "attention_mask", "packed_seq_params"),
)


@functools.cache
def engine_seams() -> Sequence[Seam]:
    """What is wrapped of it; nothing where it cannot be imported, and Megatron has stand-ins instead."""
    try:
        is_there = importlib.util.find_spec("transformer_engine") is not None
    except ValueError:  # a host's stand-in, without a spec
        is_there = False
    if not is_there:
        return ()
    return (ENGINE_ATTENTION,) if importlib.import_module(ENGINE_ATTENTION.module).HAVE_TE else ()


def is_engine_attention(module: nn.Module) -> bool:
    """Whether a module is Transformer Engine's attention as Megatron wraps it, or derived from that."""
    return any(isinstance(module, seam.owner()) for seam in engine_seams())
