# SPDX-License-Identifier: Apache-2.0
"""What a model call that runs eager costs beside a call without the plugin."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import megagraph
from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds, in_turns
from benchmarks.subjects.hosts import install_for, made_quickly
from benchmarks.subjects.layers import LAYERS, TOKENS, capture
from benchmarks.subjects.packs import a_pack, model_options
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer, packed_seq_params

# The model under the wrappers does nothing: its forward calls its block, whose forward returns the hidden
# states. A real call scatters by a hundred microseconds, in which what is asked for here would be lost.
HIDDEN = 256
CALL_ROUNDS, SAMPLES, CALLS = 15, 3, 100  # samples of each round, calls of each sample


class _Case(NamedTuple):
    """One way to call the model, whose one capacity has room for `num_seqs` documents."""

    mode: str = "graph"
    num_seqs: int = 8
    documents: int = 3  # of the pack; none for a call without one
    scheduled: bool = True  # inside Megatron's schedule, or each call for itself
    is_captured: bool = False
    bar: float = 3.0  # us more


_EAGER = "eager through the patch, {}: a call of a model that does nothing"
_MISFIT, _PADDED = "pack that fits no capacity", "mode eager, padding of the pack to its capacity included"
_OUTSIDE = f"call outside of any schedule, {LAYERS} layers captured"
_CAPTURED = _Case(scheduled=False, is_captured=True, bar=20.0)
CASES = {
    _EAGER.format("no pack"): _Case(documents=0),
    _EAGER.format(_MISFIT): _Case(num_seqs=2),
    _EAGER.format(f"{_MISFIT}, outside of a schedule"): _Case(num_seqs=2, scheduled=False),
    _EAGER.format(_PADDED): _Case(mode="eager", bar=25.0),
    f"{_OUTSIDE}, no pack": _CAPTURED._replace(documents=0),
    f"{_OUTSIDE}, a {_MISFIT}": _CAPTURED._replace(documents=16),
}


class _TimedTrainer(Trainer):
    """Times rounds of calls of its model while all models are idle."""

    is_idle: ClassVar = False
    times_us: list[float]
    documents = 3

    def call(self, pack: Pack) -> Tensor:
        """One sample: `CALLS` calls, the device idle before."""
        tokens = pack.tokens.unsqueeze(0).to(self.device)
        hidden = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device=self.device)
        given = {"input_ids": tokens, "position_ids": hidden, "attention_mask": None, "labels": tokens}
        ends = torch.linspace(0, TOKENS, self.documents + 1, device=self.device).int()
        params = packed_seq_params(ends, TOKENS // 2) if self.documents else None

        def calls() -> None:
            for _ in range(CALLS):
                self.chunk(**given, packed_seq_params=params)

        self.times_us.append(host_seconds(calls) * 1e6 / CALLS)
        return tokens.float()

    def _forward_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        if not self.is_idle:
            return super()._forward_step(packs, model)
        return self.call(next(packs)), lambda losses: (losses.mean(), {"loss": losses.mean()})

    def one_round(self, case: _Case, *, is_patched: bool) -> list[float]:
        """Microseconds of a call in each sample. Raises `RuntimeError` where one replayed."""
        self.times_us, self.documents = [], case.documents
        packs = [a_pack(TOKENS)] * (1 + SAMPLES)
        before = 0
        if is_patched:
            install_for(TOKENS, case.num_seqs, mode=case.mode, cuda_graph_warmup_steps=1)
            before = capture(self)["replays"] if case.is_captured else 0
        _TimedTrainer.is_idle = True
        with torch.no_grad():
            if case.scheduled:
                self.forward_backward(packs, forward_only=True)
            for pack in () if case.scheduled else packs:
                self.call(pack)
        if sum(report["replays"] for report in megagraph.reports()) != before:
            raise RuntimeError("expected eager calls only, got replays")
        _TimedTrainer.is_idle = False
        megagraph.uninstall()
        return self.times_us[1:]


@contextlib.contextmanager
def _models_that_idle() -> Iterator[None]:
    """Under whatever wraps the forwards, an idle model does nothing: its block returns its input.

    What is given as positions are the hidden states then.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlock

    model_forward, block_forward = GPTModel.forward, TransformerBlock.forward

    @functools.wraps(model_forward)
    def call_block(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _TimedTrainer.is_idle:
            return model_forward(model, *args, **kwargs)
        states, params = kwargs["position_ids"], kwargs.get("packed_seq_params")
        return model.decoder(hidden_states=states, attention_mask=None, packed_seq_params=params)

    @functools.wraps(block_forward)
    def return_input(block: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_idle = _TimedTrainer.is_idle
        return hidden_states if is_idle else block_forward(block, hidden_states, *args, **kwargs)

    block = mock.patch.object(TransformerBlock, "forward", return_input)
    with block, mock.patch.object(GPTModel, "forward", call_block):
        yield


def measure_calls() -> Answer:
    """By case the samples `patched` and `unpatched` in us, those of one round at the same places."""
    trainer = made_quickly(_TimedTrainer, model_options(HIDDEN, layers=LAYERS, tokens=TOKENS))
    times: Answer = {name: {"patched": [], "unpatched": []} for name in CASES}
    with _models_that_idle():
        for _, (name, how) in in_turns([*itertools.product(CASES, ("patched", "unpatched"))], CALL_ROUNDS):
            times[name][how] += trainer.one_round(CASES[name], is_patched=how == "patched")
    return times
