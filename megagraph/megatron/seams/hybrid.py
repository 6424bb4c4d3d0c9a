# SPDX-License-Identifier: Apache-2.0
"""Hybrid models and their stacks of layers, which releases call by other names."""

import importlib
import inspect
from typing import Any

from megagraph.megatron.seams.models import BLOCK_FORWARD, GPT_FORWARD
from megagraph.megatron.seams.seam import Seam

__all__ = [
    "HYBRID_FORWARD",
    "HYBRID_STACK_FORWARD",
    "MAMBA_FORWARD",
    "MAMBA_STACK_FORWARD",
    "MIXER_DOCUMENTS",
    "hybrid_seams",
    "packs_say_documents",
]

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
