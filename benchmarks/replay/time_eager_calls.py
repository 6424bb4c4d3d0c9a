# SPDX-License-Identifier: Apache-2.0
"""What a model call that runs eager costs the host through the patch, and with nothing patched."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring.compare import Answer, median_difference, spread
from benchmarks.packs.cases import model_options
from benchmarks.replay.time_rival_layers import TOKENS, a_pack, made_quickly
from megagraph import megatron
from megagraph.cli.trainer import Trainer
from megagraph.config import GraphConfig
from megagraph.data import Pack, position_ids

LAYERS = 2
HIDDEN = 256
ROUNDS = 25
CALLS = 10  # of each round that count
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One way to call the model.

    Args:
        mode: the plugin's; `off` patches nothing.
        num_seqs: documents of its one capacity; the pack has three.
        packed: hand over a pack.
        scheduled: inside Megatron's schedule, or each call for itself.
    """

    mode: str = "off"
    num_seqs: int = 8
    packed: bool = True
    scheduled: bool = True

    @property
    def unpatched(self) -> "_Case":
        """What it is compared with."""
        return _Case(packed=self.packed, scheduled=self.scheduled)


CASES = {
    "mode eager, pack of a capacity": _Case(mode="eager"),
    "pack that fits no capacity": _Case(mode="graph", num_seqs=2),
    "no pack": _Case(mode="graph", packed=False),
    "pack that fits no capacity, outside of a schedule": _Case(mode="graph", num_seqs=2, scheduled=False),
}


class _TimedTrainer(Trainer):
    """Times each call of its model, the device idle before."""

    times: list[float]
    packed = True

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        """Without rotary positions: on packs the plugin's are faster than Megatron's, which is not asked."""
        from megatron.core.models.gpt import GPTModel

        from megagraph.megatron.specs import get_gpt_block_varlen_spec

        model: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_block_varlen_spec(config),
            vocab_size=self.options.vocab,
            max_sequence_length=self.options.max_tokens,
            position_embedding_type="learned_absolute",
        )
        return model

    def call(self, pack: Pack, model: Any) -> Tensor:
        """One timed call."""
        from megatron.core.packed_seq_params import PackedSeqParams

        offsets = pack.cu_seqlens.to(self.device)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=pack.max_seqlen,
            max_seqlen_kv=pack.max_seqlen,
        )
        tokens, positions = (t.unsqueeze(0).to(self.device) for t in (pack.tokens, position_ids(pack)))
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses: Tensor = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None,
            labels=tokens,
            packed_seq_params=params if self.packed else None,
        )
        self.times.append(time.perf_counter() - start)
        return losses

    def _forward_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        return self.call(next(packs), model), _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss}


def _one_round(trainer: _TimedTrainer, case: _Case, tokens: int) -> list[float]:
    trainer.times, trainer.packed = [], case.packed
    if case.mode != "off":
        megatron.install(
            GraphConfig(
                mode=case.mode,
                cuda_graph_max_packed_seqs=(case.num_seqs,),
                max_seqlen_per_dp_cp_rank=tokens,
                progress=False,
                log_interval=0,
            )
        )
    try:
        packs = [a_pack(tokens)] * (WARM_UP + CALLS)
        with torch.no_grad():
            if case.scheduled:
                trainer.forward_backward(packs, forward_only=True)
            else:
                for pack in packs:
                    trainer.call(pack, trainer.model)
        replays = sum(report["replays"] for report in megatron.reports())
        if replays:
            raise RuntimeError(f"expected eager calls only, got {replays} replays")
    finally:
        megatron.uninstall()
    return trainer.times[WARM_UP:]


def answer_of(patched: Sequence[float], unpatched: Sequence[float]) -> Answer:
    """Compares calls, those of one round beside those of the same round; seconds become microseconds."""
    return {
        "patched": spread(patched),
        "unpatched": spread(unpatched),
        "more": median_difference(patched, unpatched) * 1e6,
        "samples": len(patched),
    }


def measure_calls() -> dict[str, Answer]:
    """Host time of a forward of the whole model, by case, patched in turn with unpatched.

    Returns:
        For each of `CASES` the spreads `patched` and `unpatched` and the median of what a patched call
        takes `more`, in us a call, and `samples` of each.
    """
    options = model_options(HIDDEN, layers=LAYERS, tokens=TOKENS)
    trainer = made_quickly(_TimedTrainer, options)
    assert isinstance(trainer, _TimedTrainer)
    kinds = [*CASES.values(), *dict.fromkeys(case.unpatched for case in CASES.values())]
    times: dict[_Case, list[float]] = {kind: [] for kind in kinds}
    for index in range(ROUNDS):
        start = index % len(kinds)
        for kind in kinds[start:] + kinds[:start]:
            times[kind] += _one_round(trainer, kind, options.max_tokens)
    return {name: answer_of(times[case], times[case.unpatched]) for name, case in CASES.items()}
