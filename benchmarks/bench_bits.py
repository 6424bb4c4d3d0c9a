# SPDX-License-Identifier: Apache-2.0
"""Whether graphs are right, of whole layers and of attention, MLP or both.

Losses and gradients of every step stand beside those of a training that knows nothing of the plugin, in mode
`eager` and in mode `graph`. Each training runs in a process of its own. Packs are canonical already: as many
rows and documents as their capacity has, and its `max_seqlen`. So a run without the plugin launches the same
kernels on them.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import megagraph
from benchmarks.measuring.children import Answer, Parts, measure_part
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import DETERMINISTIC, engines_spec, install, seed_streams
from benchmarks.subjects.packs import LAYER_KINDS, MICRO_BATCHES, model_options
from megagraph._C import Capacity
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import ModelOptions, Trainer

MODES = ("eager", "graph")
DOCUMENTS = 6
MODEL = model_options(256, layers=3, tokens=1024)


@dataclass(frozen=True, kw_only=True)
class BitsCase:
    """One training."""

    share: float = 0.5  # `max_seqlen` of packs, of their tokens
    transformer_engine: bool = True  # layers of its modules, otherwise ours
    fused_rope: bool = False  # its kernel rotates
    modules: tuple[str, ...] = ()  # what of each layer is graphed; none for whole layers
    steps: int = 60


SCOPES = {"attn": ("attn",), "mlp": ("mlp",), "attn and mlp": ("attn", "mlp")}
BITS = {
    "Transformer Engine, max_seqlen = half of the tokens": BitsCase(),
    "Transformer Engine, fused RoPE, max_seqlen = tokens": BitsCase(share=1.0, fused_rope=True),
    **{
        f"{layers}, {scope}": BitsCase(transformer_engine=is_engine, modules=modules, steps=100)
        for (layers, is_engine), (scope, modules) in itertools.product(LAYER_KINDS.items(), SCOPES.items())
    },
}


def canonical_packs(tokens: int, longest: int, count: int, *, seed: int = 3) -> Iterator[Pack]:
    """Packs of `DOCUMENTS` documents that fill `tokens` rows; the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        while True:
            cuts = torch.randperm(tokens - 1, generator=generator)[: DOCUMENTS - 1].sort().values + 1
            ends = torch.tensor([0, *cuts.tolist(), tokens], dtype=torch.int32)
            if int(ends.diff().max()) <= longest:
                break
        ids = torch.randint(256, (tokens,), generator=generator)
        yield Pack(tokens=ids, cu_seqlens=ends, max_seqlen=longest)


def _trained(case: BitsCase, options: ModelOptions) -> Iterator[dict[str, list[Tensor]]]:
    """Trains; the losses and the gradients of every step, which the next one overwrites."""
    spec = engines_spec() if case.transformer_engine else None
    seed_streams()
    trainer = Trainer(options, config={"apply_rope_fusion": case.fused_rope}, spec=spec)
    tokens = options.max_tokens
    packs = canonical_packs(tokens, int(case.share * tokens), case.steps * MICRO_BATCHES)
    for _ in range(case.steps):
        losses = trainer.forward_backward(list(itertools.islice(packs, MICRO_BATCHES)))
        yield {"losses": losses, "gradients": [grad for _name, grad in trainer.named_main_grads()]}
        trainer.update()


def measure_bits(case: BitsCase, options: ModelOptions = MODEL) -> Answer:
    """By mode: losses and gradients that differ from those of an unpatched run, and the report.

    `losses` and `gradients`: how many there are to compare.
    """
    kept = [
        {what: [tensor.clone() for tensor in tensors] for what, tensors in step.items()}
        for step in _trained(case, options)
    ]
    answer: Answer = {what: sum(len(step[what]) for step in kept) for what in kept[0]}
    tokens = options.max_tokens
    capacity = Capacity(tokens=tokens, num_seqs=DOCUMENTS, max_seqlen=int(case.share * tokens))
    for mode in MODES:
        differing = dict.fromkeys(kept[0], 0)
        install(mode=mode, capacities=(capacity,), cuda_graph_modules=case.modules)
        for step, theirs in zip(_trained(case, options), kept, strict=True):
            for what, ours in step.items():
                pairs = zip(ours, theirs[what], strict=True)
                differing[what] += sum(not torch.equal(*pair) for pair in pairs)
        (report,) = megagraph.reports()
        answer[mode] = {**differing, "report": report}
        megagraph.uninstall()
    return answer


def _measured(case: BitsCase) -> Answer:
    torch.use_deterministic_algorithms(True)
    return measure_bits(case)


PARTS: Parts = {name: partial(_measured, case) for name, case in BITS.items()}


@functools.cache
def _answers() -> Mapping[str, Future[Answer]]:
    """All trainings run side by side, since nothing is timed."""
    pool, ask = ThreadPoolExecutor(len(BITS)), partial(measure_part, __name__, environment=DETERMINISTIC)
    return {name: pool.submit(ask, name) for name in BITS}


def _figures(name: str) -> list[Figure]:
    """What differs from the unpatched run, and how much of it was replayed."""
    answer, figures = _answers()[name].result(), []
    differ = f"of {BITS[name].steps} steps that differ from an unpatched run's"
    for mode, what in itertools.product(MODES, ("losses", "gradients")):
        title = f"{name}: {what} {differ}, mode {mode}"
        figures.append(Figure(name=title, value=answer[mode][what], unit=f"of {answer[what]}", bar=0))
    report = answer["graph"]["report"]
    title, share = f"{name}: share of layer calls replayed, mode graph", report["replays"] / report["calls"]
    return [*figures, Figure(name=title, value=share, unit="1")]


FIGURES = {name: partial(_figures, name) for name in BITS}
