# SPDX-License-Identifier: Apache-2.0
"""Where megatron-core is touched, and what each place must look like. The only room that knows a release.

A seam is checked by its signature when the plugin is installed; what is missing or changed is named
then, not in the middle of a run.
"""

from megagraph.megatron.seams.experts import (
    DISPATCH_PREPROCESS,
    EXPERT_BIAS,
    EXPERT_CHOICE,
    EXPERT_FORWARD,
    EXPERT_PREPROCESS,
    MLP_FORWARD,
    PERMUTATION,
    PERMUTED_ROWS,
    ROUTER_FORWARD,
    ROUTING,
    SAVING_GROUP,
    moe_metrics,
    permutation_sorts,
    replaced_choice,
)
from megagraph.megatron.seams.hybrid import (
    HYBRID_FORWARD,
    HYBRID_STACK_FORWARD,
    MAMBA_FORWARD,
    MAMBA_STACK_FORWARD,
    MIXER_DOCUMENTS,
    hybrid_seams,
    packs_say_documents,
)
from megagraph.megatron.seams.models import (
    ATTENTION_ROPE,
    BLOCK_FORWARD,
    DESTROY_MODEL_PARALLEL,
    DESTROY_PROCESS_GROUP,
    GPT_FORWARD,
    LATENT_ATTENTION,
    LATENT_ROPE,
    PACK_GROUPS,
    PACKED_SEQ_PARAMS,
    PREDICTION_FORWARD,
    SCHEDULES,
    has_latent_attention,
    replaced_rope,
)
from megagraph.megatron.seams.release import SUPPORTED, check_core
from megagraph.megatron.seams.seam import Seam, is_replaced

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
    "MAMBA_FORWARD",
    "MAMBA_STACK_FORWARD",
    "MIXER_DOCUMENTS",
    "MLP_FORWARD",
    "PACKED_SEQ_PARAMS",
    "PACK_GROUPS",
    "PERMUTATION",
    "PERMUTED_ROWS",
    "PREDICTION_FORWARD",
    "ROUTER_FORWARD",
    "ROUTING",
    "SAVING_GROUP",
    "SCHEDULES",
    "SUPPORTED",
    "Seam",
    "check_core",
    "has_latent_attention",
    "hybrid_seams",
    "is_replaced",
    "moe_metrics",
    "packs_say_documents",
    "permutation_sorts",
    "replaced_choice",
    "replaced_rope",
]
