# SPDX-License-Identifier: Apache-2.0
"""The only floor that knows Megatron."""

from megagraph.megatron.parallel.context import context_groups
from megagraph.megatron.patch.installation import install, reports, resume, suspend, uninstall
from megagraph.megatron.plugin import disable_cuda_graphs_this_step, is_cuda_graph_skipped
from megagraph.megatron.specs import (
    get_gpt_block_varlen_spec,
    get_gpt_layer_varlen_spec,
    get_hybrid_stack_varlen_spec,
    with_grouped_experts,
)

__all__ = [
    "context_groups",
    "disable_cuda_graphs_this_step",
    "get_gpt_block_varlen_spec",
    "get_gpt_layer_varlen_spec",
    "get_hybrid_stack_varlen_spec",
    "install",
    "is_cuda_graph_skipped",
    "reports",
    "resume",
    "suspend",
    "uninstall",
    "with_grouped_experts",
]
