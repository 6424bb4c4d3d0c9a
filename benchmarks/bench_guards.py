# SPDX-License-Identifier: Apache-2.0
"""What it costs to notice every change and to verify graphs; and that there are no false alarms.

A stack of 24 layers of hidden 1024, of our attention and of Transformer Engine's modules; and hosts that
train a small model for 1,000 steps, in which nothing of a layer changes. Each part runs in a process of its
own.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench_bits import DOCUMENTS, canonical_packs
from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import host_seconds, wall_ms
from benchmarks.measuring.figures import Measurement, plain, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects import layers
from benchmarks.subjects.hosts import Parts, answering, engines_spec, install_for
from benchmarks.subjects.inside import graphs_of
from benchmarks.subjects.layers import captured
from benchmarks.subjects.packs import LAYER_KINDS, MICRO_BATCHES, a_pack, model_options
from megagraph import megatron
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import ModelOptions, Trainer, packed_seq_params

ROUNDS, CALLS = 200, 10  # calls of each hot sample
IDLE_SECONDS = 0.002
VERIFY_ONE_IN = 50
ALARM_MODEL = model_options(256, layers=3, tokens=512)


def measure_guards(options: ModelOptions, *, transformer_engine: bool) -> Answer:
    """Microseconds a layer that guards take before a call and before a step, and what a verification took.

    `hot`: one after another; `idle`: each after the host has slept. `eager`: seconds of a micro-batch.
    """
    install_for(options.max_tokens, 8, cuda_graph_warmup_steps=1)
    trainer = captured(options, spec=engines_spec() if transformer_engine else None)
    watch = graphs_of(trainer).captures.watch
    checks = {"call": lambda: watch.state(False), "step": watch.whole_state}
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, check in checks.items():
            hot = host_seconds(lambda check=check: [check() for _ in range(CALLS)])  # type: ignore[misc]
            time.sleep(IDLE_SECONDS)
            idle = host_seconds(check)
            for how, seconds in (("hot", hot / CALLS), ("idle", idle)):
                times.setdefault(f"{name}, {how}", []).append(seconds * 1e6 / options.layers)
    verification: dict[str, Any] = graphs_of(trainer).report()["verification"]
    with megatron.disable_cuda_graphs_this_step():
        eager = wall_ms(lambda: trainer.forward_backward([a_pack(options.max_tokens)])) / 1e3
    return {"times": times, "verification": verification, "eager": eager}


# -- calls as hosts make them ----------------------------------------------------------------------


def _verl_pack(offsets: Tensor, longest: int) -> Any:
    """One tensor for all offsets."""
    params = packed_seq_params(offsets, longest)
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = offsets
    return params


def _bridge_pack(offsets: Tensor, longest: int) -> Any:
    """The longest document is a tensor on the host."""
    return packed_seq_params(offsets, torch.tensor(longest, device="cpu", dtype=torch.int32))  # type: ignore[arg-type]


def _swift_pack(offsets: Tensor, longest: int) -> Any:
    """An attribute that Megatron does not know."""
    params = packed_seq_params(offsets, longest)
    params.seq_lens = offsets.diff()
    return params


@dataclass(frozen=True, kw_only=True)
class Host:
    """How a host calls its model.

    Args:
        pack: makes its packs.
        takes_losses: passes labels and positions; otherwise it works on the logits.
        is_scheduled: the log-probabilities or the evaluation before a training step run in a schedule;
            otherwise each call stands alone, of the bare model.
        every: in which steps.
    """

    pack: Callable[[Tensor, int], Any]
    takes_losses: bool = True
    is_scheduled: bool = True
    every: int = 1


HOSTS = {
    "verl-like": Host(pack=_verl_pack, takes_losses=False),
    "Megatron-Bridge-like": Host(pack=_bridge_pack, every=4),
    "ms-swift-like": Host(pack=_swift_pack, is_scheduled=False),
}


class _HostTrainer(Trainer):
    """Trains as a host does, on packs that differ in rows and documents."""

    def __init__(self, host: Host, options: ModelOptions, spec: Any) -> None:
        self.host = host
        super().__init__(options, spec=spec)

    def call(self, pack: Pack, model: nn.Module) -> Tensor:
        """What a loss is made of, for each token."""
        tokens = pack.tokens.unsqueeze(0).to(self.device)
        params = self.host.pack(pack.cu_seqlens.to(self.device), pack.max_seqlen)
        given = {"input_ids": tokens, "attention_mask": None, "packed_seq_params": params}
        if self.host.takes_losses:
            positions = torch.arange(tokens.size(1), device=self.device).unsqueeze(0)
            losses: Tensor = model(position_ids=positions, labels=tokens, **given)
            return losses
        logits = model(position_ids=None, **given).float().div_(0.7)
        surprise: Tensor = -logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return surprise

    def _forward_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        return self.call(next(packs), model), lambda of: (
            of.float().mean(),
            {"loss": of.float().mean().detach()},
        )

    @torch.no_grad()
    def look(self, packs: Sequence[Pack]) -> None:
        """Log-probabilities, or an evaluation."""
        self.model.eval()
        if self.host.is_scheduled:
            self.forward_backward(packs, forward_only=True)
        else:
            for pack in packs:
                self.call(pack, self.chunk)
        self.model.train()


def measure_host(
    host: Host, options: ModelOptions = ALARM_MODEL, steps: int = 1000, *, transformer_engine: bool = False
) -> Answer:
    """The report of a training in which nothing of a layer changes."""
    tokens = options.max_tokens
    install_for(tokens, DOCUMENTS, verify=VERIFY_ONE_IN)
    trainer = _HostTrainer(host, options, engines_spec() if transformer_engine else None)
    packs = map(_shortened, itertools.count(), canonical_packs(tokens, tokens // 2, steps * MICRO_BATCHES))
    for step in range(steps):
        of_step = list(itertools.islice(packs, MICRO_BATCHES))
        if step % host.every == 0:
            trainer.look(of_step)
        trainer.forward_backward(of_step)
        trainer.update()
    (report,) = megatron.reports()
    return dict(report)


def _shortened(index: int, pack: Pack) -> Pack:
    """Two of three packs lack their last document, so that they have fewer rows than the capacity."""
    if index % 3 == 0:
        return pack
    ends = pack.cu_seqlens[:-1]
    return Pack(tokens=pack.tokens[: int(ends[-1])], cu_seqlens=ends, max_seqlen=int(ends.diff().max()))


BARS = {"call": 1.0, "step": 8.0}  # us a layer
COSTS = {
    name: partial(
        measure_guards,
        model_options(1024, layers=layers.LAYERS, tokens=layers.TOKENS),
        transformer_engine=is_engine,
    )
    for name, is_engine in LAYER_KINDS.items()
}
ALARMS = {
    f"{host}, 1000 steps, {kind}": partial(measure_host, HOSTS[host], transformer_engine=is_engine)
    for host in HOSTS
    for kind, is_engine in LAYER_KINDS.items()
}
PARTS: Parts = COSTS | ALARMS
answer = answering(PARTS)


def cost_figures(name: str, answer: Answer) -> list[Figure]:
    """Guards before a call and before a step, and a verification beside an eager micro-batch."""
    figures = [
        timed(
            f"guards before a {what}, {name}, of a layer, {how}, median",
            answer["times"][f"{what}, {how}"],
            "us",
            bar=bar,
        )
        for what, bar in BARS.items()
        for how in ("hot", "idle")
    ]
    verification, title = answer["verification"], f"verification of a variant, {name}, {layers.LAYERS} layers"
    each = verification["seconds"] / verification["verified"]
    rival = {"rival": "an eager micro-batch", "rival_value": answer["eager"] * 1e3}
    figures.append(Figure(name=title, value=each * 1e3, unit="ms", **rival))
    return figures


def alarm_figures(name: str, report: Answer) -> list[Figure]:
    """Calls that ran eager although nothing had changed, of how many."""
    figures = [
        Figure(name=f"{name}: {reason}", value=report["eager"].get(reason, 0), unit="calls", bar=0)
        for reason in ("STATE_CHANGED", "VERIFY_FAILED")
    ]
    counts = {"all": report["calls"], "replayed": report["replays"]}
    counts |= {"variants verified": report["verification"]["verified"]}
    return [*figures, *plain(name, {what: (count, "calls") for what, count in counts.items()})]


def measure(measurement: Measurement) -> None:
    """Measures guards, a verification, and long trainings."""
    ask = partial(measure_part, __name__)
    for name in COSTS:
        measurement.take(f"costs, {name}", lambda name=name: cost_figures(name, ask(name)))  # type: ignore[misc]
    measurement.take_side_by_side(dict.fromkeys(ALARMS, alarm_figures), ask)
