# SPDX-License-Identifier: Apache-2.0
"""Hybrid models whose Mamba layers have a mixer in plain torch: the real one needs a GPU and mamba-ssm."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron_rig import Micro, ModelTrainer
from moe_rig import EXPERTS, ExpertTrainer
from torch import Tensor, nn

import megagraph
from megagraph.megatron import seams

PATTERN = "M*-M"


class Documented(Micro):
    """A micro-batch whose pack says the document of each row, where the release's packs can."""

    def params(self, device: torch.device) -> Any:
        said = {"total_tokens": self.physical} if seams.packs_have("seq_idx") else {}
        return dataclasses.replace(super().params(device), **said)


class PlainMixer(nn.Module):
    """A state that decays from row to row, between projections as those of Megatron's mixer. Rows are mixed
    within documents alone, those of `seq_idx`, as Megatron's mixers get it: from the pack, or from
    `MambaMixer._create_packed_seq_idx` where packs have none. Without any all rows are one document."""

    def __init__(self, config: Any, d_model: int, pg_collection: Any = None, **unused: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        further = {"config": config, "init_method": config.init_method, "tp_group": pg_collection.tp}
        further |= {"bias": False, "skip_bias_add": True}
        self.in_proj = ColumnParallelLinear(d_model, 2 * d_model, gather_output=False, **further)
        self.out_proj = RowParallelLinear(d_model, d_model, input_is_parallel=True, **further)
        self.rate = nn.Parameter(torch.full((), 0.1))
        self.norm_weight = nn.Parameter(torch.ones(d_model))

    def forward(self, hidden_states, inference_context: Any = None, packed_seq_params: Any = None) -> Any:
        assert inference_context is None
        rows = hidden_states.size(0)
        document = self._documents(packed_seq_params, rows)
        projected, _bias = self.in_proj(hidden_states)
        gate, values = projected[:, 0].float().chunk(2, dim=-1)
        place = torch.arange(rows, device=values.device)
        reaches = (place[:, None] >= place) & (document[:, None] == document)
        weights = (self.rate.float() * (place - place[:, None])).masked_fill(~reaches, -torch.inf).exp()
        normed = F.rms_norm(weights @ values * F.silu(gate), gate.shape[1:], self.norm_weight.float())
        return self.out_proj(normed.to(hidden_states.dtype)[:, None])

    def _documents(self, params: Any, rows: int) -> Tensor:
        from megatron.core.ssm.mamba_mixer import MambaMixer

        if seams.packs_have("seq_idx"):
            index = params.seq_idx
        else:
            index = MambaMixer._create_packed_seq_idx(self, params, rows)
        if index is None:
            return torch.zeros(rows, dtype=torch.int32, device=params.cu_seqlens_q.device)
        assert index.shape == (1, rows) and index.dtype is torch.int32
        return index[0]


def mamba_spec(*experts: Any, **given: Any) -> Any:
    """Our stack's spec with that mixer; takes what its function takes."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = megagraph.get_hybrid_stack_varlen_spec(*experts, **given)
    spec.submodules.mamba_layer.submodules.mixer = ModuleSpec(module=PlainMixer)
    return spec


def mamba(*, pattern: str = PATTERN, **further: Any) -> ModelTrainer:
    return ModelTrainer(pattern=pattern, **{"spec": mamba_spec(), **further})


def mamba_experts(pattern: str, **further: Any) -> ExpertTrainer:
    return ExpertTrainer(pattern, pattern=pattern, **{"spec": mamba_spec(EXPERTS, False), **further})
