# SPDX-License-Identifier: Apache-2.0
"""Hybrid models whose Mamba layers have a mixer in plain torch: the real one needs a GPU and mamba-ssm."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron_rig import Micro, ModelTrainer
from moe_rig import EXPERTS, ExpertTrainer
from torch import Tensor, nn

import megagraph
from megagraph.megatron import seams

PATTERN = "M*-M"
STATE, HEADS, TAPS = 4, 2, 4


@dataclass(frozen=True, kw_only=True)
class Documented(Micro):
    """A micro-batch whose pack says the document of each row, where the release's packs can."""

    says_documents: bool = True  # whether it does

    def params(self, device: torch.device) -> Any:
        made = super().params(device)
        if self.says_documents and seams.packs_say_documents():
            made = dataclasses.replace(made, total_tokens=self.physical)
        return made


class PlainMixer(nn.Module):
    """Mamba-2 for one pack, in its quadratic form: parameters and projections of Megatron's mixer.

    Rows are mixed within documents alone, those of `seq_idx`, as Megatron's mixers get it: from the pack, or
    from `MambaMixer._create_packed_seq_idx` where packs have none. Without any all rows are one document.
    """

    def __init__(self, config: Any, d_model: int, pg_collection: Any = None, **unused: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        self.inner = 2 * d_model
        width = self.inner + 2 * STATE
        further = {"config": config, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            d_model,
            self.inner + width + HEADS,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **further,
        )
        self.out_proj = RowParallelLinear(
            self.inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **further,
        )
        self.conv1d_weight = nn.Parameter(torch.randn(width, 1, TAPS) / 2)
        self.conv1d_bias = nn.Parameter(torch.randn(width) / 8)
        self.dt_bias = nn.Parameter(torch.randn(HEADS) / 2)
        self.A_log = nn.Parameter(torch.linspace(0.5, 1.5, HEADS).log())
        self.D = nn.Parameter(torch.ones(HEADS))
        self.norm_weight = nn.Parameter(torch.ones(self.inner))

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        assert inference_context is None
        rows = hidden_states.size(0)
        document = self._documents(packed_seq_params, rows)
        projected, _bias = self.in_proj(hidden_states)
        width = self.inner + 2 * STATE
        z, mixed, dt = projected[:, 0].float().split([self.inner, width, HEADS], dim=-1)
        x, b, c = self._convolve(mixed, document).split([self.inner, STATE, STATE], dim=-1)
        x = x.view(rows, HEADS, -1)
        step = F.softplus(dt + self.dt_bias.float())
        decay = (step * -self.A_log.float().exp()).cumsum(0)
        place = torch.arange(rows, device=x.device)
        reaches = (place[:, None] >= place) & (document[:, None] == document)
        since = (decay[:, None] - decay).masked_fill(~reaches[..., None], -torch.inf).exp()
        weights = (c @ b.T)[..., None] * since
        y = torch.einsum("ijh,jhp->ihp", weights, step[..., None] * x) + self.D.float()[:, None] * x
        gated = y.reshape(rows, -1) * F.silu(z)
        normed = F.rms_norm(gated, (self.inner,), self.norm_weight.float(), 1e-5)
        return self.out_proj(normed.to(hidden_states.dtype)[:, None])

    def _documents(self, params: Any, rows: int) -> Tensor:
        from megatron.core.ssm.mamba_mixer import MambaMixer

        if seams.packs_say_documents():
            index = params.seq_idx
        else:
            index = MambaMixer._create_packed_seq_idx(self, params, rows)
        if index is None:
            return torch.zeros(rows, dtype=torch.int32, device=params.cu_seqlens_q.device)
        assert index.shape == (1, rows) and index.dtype is torch.int32
        return index[0]

    def _convolve(self, mixed: Tensor, document: Tensor) -> Tensor:
        out = self.conv1d_bias.float().expand(mixed.shape)
        for tap in range(TAPS):
            back = TAPS - 1 - tap
            shifted = F.pad(mixed, (0, 0, back, 0))[: mixed.size(0)]
            of_same = F.pad(document + 1, (back, 0))[: mixed.size(0)] == document + 1
            out = out + shifted * of_same[:, None] * self.conv1d_weight[:, 0, tap].float()
        return F.silu(out)


def mamba_spec(*experts: Any, **given: Any) -> Any:
    """Our stack's spec with that mixer; takes what its function takes."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = megagraph.get_hybrid_stack_varlen_spec(*experts, **given)
    spec.submodules.mamba_layer.submodules.mixer = ModuleSpec(module=PlainMixer)
    return spec


def mamba(*, pattern: str = PATTERN, **further: Any) -> ModelTrainer:
    """A model of such layers."""
    return ModelTrainer(pattern=pattern, **{"spec": mamba_spec(), **further})


def mamba_experts(pattern: str, **further: Any) -> ExpertTrainer:
    """One with experts, too."""
    return ExpertTrainer(pattern, pattern=pattern, **{"spec": mamba_spec(EXPERTS, False), **further})
