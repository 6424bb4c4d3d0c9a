# SPDX-License-Identifier: Apache-2.0
"""What the patch adds to a model call that runs eager: host time of its wrappers.

The model under the wrappers does nothing: its forward calls its block, whose forward returns the hidden
states. A real call scatters by a hundred microseconds, in which what is asked for here would be lost.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.measuring.clocks import host_seconds
from benchmarks.subjects.hosts import install_for
from benchmarks.subjects.layers import TOKENS, made_quickly
from benchmarks.subjects.packs import a_pack, model_options
from megagraph import megatron
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer, packed_seq_params

LAYERS, HIDDEN = 2, 256
ROUNDS, SAMPLES, CALLS = 15, 3, 100  # samples of each round, calls of each sample


class _Case(NamedTuple):
    """One way to call the model; its one capacity has room for `num_seqs` documents, the pack has three."""

    mode: str = "off"  # patches nothing
    num_seqs: int = 8
    packed: bool = True
    scheduled: bool = True  # inside Megatron's schedule, or each call for itself


CASES = {
    "no pack": _Case(mode="graph", packed=False),
    "pack that fits no capacity": _Case(mode="graph", num_seqs=2),
    "pack that fits no capacity, outside of a schedule": _Case(mode="graph", num_seqs=2, scheduled=False),
    "mode eager, padding of the pack to its capacity included": _Case(mode="eager"),
}


@contextlib.contextmanager
def _idle_models() -> Iterator[None]:
    """Models do nothing meanwhile: the block is called, and returns its input."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlock

    @functools.wraps(GPTModel.forward)
    def call_block(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        # What is given as positions are the hidden states.
        states = kwargs["position_ids"]
        return self.decoder(hidden_states=states, attention_mask=None, packed_seq_params=packed_seq_params)

    @functools.wraps(TransformerBlock.forward)
    def return_input(self: Any, hidden_states: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    block = mock.patch.object(TransformerBlock, "forward", return_input)
    with mock.patch.object(GPTModel, "forward", call_block), block:
        yield


class _TimedTrainer(Trainer):
    """Times rounds of calls of its model."""

    times_us: list[float]
    packed = True

    def call(self, pack: Pack, model: nn.Module) -> Tensor:
        """One sample: `CALLS` calls, the device idle before."""
        tokens = pack.tokens.unsqueeze(0).to(self.device)
        hidden = torch.zeros(pack.num_tokens, 1, HIDDEN, dtype=torch.bfloat16, device=self.device)
        params = packed_seq_params(pack.cu_seqlens.to(self.device), pack.max_seqlen)
        given = params if self.packed else None

        def calls() -> None:
            for _ in range(CALLS):
                model(
                    input_ids=tokens,
                    position_ids=hidden,
                    attention_mask=None,
                    labels=tokens,
                    packed_seq_params=given,
                )

        self.times_us.append(host_seconds(calls) * 1e6 / CALLS)
        return tokens.float()

    def _forward_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        return self.call(next(packs), self.chunk), lambda losses: (losses.mean(), {"loss": losses.mean()})

    def one_round(self, case: _Case) -> list[float]:
        """Microseconds of a call in each sample. Raises `RuntimeError` where one replayed."""
        self.times_us, self.packed = [], case.packed
        if case.mode != "off":
            install_for(TOKENS, case.num_seqs, mode=case.mode)
        packs = [a_pack(TOKENS)] * (1 + SAMPLES)
        try:
            with torch.no_grad():
                if case.scheduled:
                    self.forward_backward(packs, forward_only=True)
                for pack in () if case.scheduled else packs:
                    self.call(pack, self.chunk)
            if replays := sum(report["replays"] for report in megatron.reports()):
                raise RuntimeError(f"expected eager calls only, got {replays} replays")
        finally:
            megatron.uninstall()
        return self.times_us[1:]


def measure_calls() -> dict[str, dict[str, list[float]]]:
    """By case the samples `patched` and `unpatched` in us, those of one round at the same places."""
    trainer = made_quickly(_TimedTrainer, model_options(HIDDEN, layers=LAYERS, tokens=TOKENS))
    assert isinstance(trainer, _TimedTrainer)
    unpatched = {name: _Case(packed=of.packed, scheduled=of.scheduled) for name, of in CASES.items()}
    kinds = [*CASES.values(), *dict.fromkeys(unpatched.values())]
    times: dict[_Case, list[float]] = {kind: [] for kind in kinds}
    with _idle_models():
        for index, offset in itertools.product(range(ROUNDS), range(len(kinds))):
            kind = kinds[(index + offset) % len(kinds)]
            times[kind] += trainer.one_round(kind)
    return {
        name: {"patched": times[case], "unpatched": times[unpatched[name]]} for name, case in CASES.items()
    }
