# SPDX-License-Identifier: Apache-2.0
"""Trainings compared bit for bit with one that knows nothing of the plugin, and calls as hosts make them.

Packs that are compared are canonical already: as many rows and documents as their capacity has, and its
`max_seqlen`. So a run without the plugin launches the same kernels on them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring.children import Answer
from benchmarks.subjects.hosts import install, install_for, seed_streams
from benchmarks.subjects.packs import MICRO_BATCHES, model_options
from megagraph import megatron
from megagraph.decide.dispatch import Capacity
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import ModelOptions, Trainer, packed_seq_params

STEPS = 60
MODES = ("eager", "graph")
LAYER_KINDS = {"our attention": False, "Transformer Engine": True}  # whether they are of its modules
DOCUMENTS = 6
MODEL = model_options(256, layers=3, tokens=1024)


@dataclass(frozen=True, kw_only=True)
class BitsCase:
    """One training.

    Args:
        share: `max_seqlen` of every pack, as a share of its tokens.
        transformer_engine: layers of its modules, otherwise ours.
        fused_rope: its kernel rotates.
        per_token: the rotary table has one row for each token of the pack.
        modules: what of each layer is graphed; none for whole layers.
    """

    share: float
    transformer_engine: bool = True
    fused_rope: bool = False
    per_token: bool = False
    modules: tuple[str, ...] = ()


_PER_TOKEN = "a rotary table with one row for each token"
BITS = {
    "Transformer Engine, max_seqlen = half of the tokens": BitsCase(share=0.5),
    "Transformer Engine, fused RoPE, max_seqlen = tokens": BitsCase(share=1.0, fused_rope=True),
    f"Transformer Engine, {_PER_TOKEN}": BitsCase(share=1.0, per_token=True),
    f"our attention, {_PER_TOKEN}": BitsCase(share=1.0, per_token=True, transformer_engine=False),
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


class _PerToken(nn.Module):
    """A rotary table that hands out a row for each token of the pack, as ms-swift's models do.

    Args:
        table: Megatron's.
    """

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table: Any = table
        self.positions: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        return self.table.get_rotary_seq_len(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows = self.table(*args, **kwargs)
        return rows if self.positions is None else rows[self.positions]


class _PerTokenTrainer(Trainer):
    """Its model's rotary table has one row for each token."""

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        chunk: Any = super().make_chunk(config, spec)
        table = _PerToken(chunk.rotary_pos_emb)

        def look(_model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            table.positions = kwargs["position_ids"][0]

        chunk.rotary_pos_emb = table
        chunk.register_forward_pre_hook(look, with_kwargs=True)
        made: nn.Module = chunk
        return made


def spec_of(transformer_engine: bool) -> Any:
    """Of layers of Transformer Engine's modules; None for ours."""
    if not transformer_engine:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec()


def _trained(
    case: BitsCase, options: ModelOptions, steps: int, each: Callable[[int, list[Tensor], list[Tensor]], None]
) -> None:
    """Trains, and gives `each` the losses and the gradients of every step."""
    spec = spec_of(case.transformer_engine)
    seed_streams()
    trainer_type = _PerTokenTrainer if case.per_token else Trainer
    trainer = trainer_type(options, config={"apply_rope_fusion": case.fused_rope}, spec=spec)
    tokens = options.max_tokens
    packs = canonical_packs(tokens, int(case.share * tokens), steps * MICRO_BATCHES)
    for step in range(steps):
        losses = trainer.forward_backward(list(itertools.islice(packs, MICRO_BATCHES)))
        each(step, losses, [grad for _name, grad in trainer.named_main_grads()])
        trainer.update()


def measure_bits(case: BitsCase, options: ModelOptions = MODEL, steps: int = STEPS) -> Answer:
    """By mode: losses and gradients that differ from those of an unpatched run, and the report.

    `losses` and `gradients`: how many there are to compare.
    """
    kept: list[tuple[list[Tensor], list[Tensor]]] = []

    def keep(_step: int, losses: list[Tensor], grads: list[Tensor]) -> None:
        kept.append((losses, [grad.clone() for grad in grads]))

    _trained(case, options, steps, keep)
    losses, grads = zip(*kept, strict=True)
    answer: Answer = {"losses": sum(map(len, losses)), "gradients": sum(map(len, grads))}
    tokens = options.max_tokens
    capacity = Capacity(tokens=tokens, num_seqs=DOCUMENTS, max_seqlen=int(case.share * tokens))
    for mode in MODES:
        differing = {"losses": 0, "gradients": 0}

        def compare(
            step: int, losses: list[Tensor], grads: list[Tensor], differing: dict[str, int] = differing
        ) -> None:
            for key, ours, theirs in zip(differing, (losses, grads), kept[step], strict=True):
                differing[key] += sum(not torch.equal(*pair) for pair in zip(ours, theirs, strict=True))

        install(mode=mode, capacities=(capacity,), cuda_graph_modules=case.modules)
        try:
            _trained(case, options, steps, compare)
            (report,) = megatron.reports()
            answer[mode] = {**differing, "report": report}
        finally:
            megatron.uninstall()
    return answer


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
        phase: what comes before each training step: log-probabilities or an evaluation.
        is_scheduled: that phase runs in a schedule; otherwise each call stands alone, of the bare model.
        every: in which steps.
    """

    pack: Callable[[Tensor, int], Any]
    takes_losses: bool
    phase: str
    is_scheduled: bool = True
    every: int = 1


HOSTS = {
    "verl-like": Host(pack=_verl_pack, takes_losses=False, phase="log-probabilities in a schedule"),
    "Megatron-Bridge-like": Host(pack=_bridge_pack, takes_losses=True, phase="evaluations", every=4),
    "ms-swift-like": Host(
        pack=_swift_pack,
        takes_losses=True,
        phase="log-probabilities of the bare model, outside of any schedule",
        is_scheduled=False,
    ),
}
HOST_STEPS = 12


class _HostTrainer(Trainer):
    """Trains as a host does, on packs that differ in rows and documents.

    Args:
        host: which.
        options: of the model.
        spec: of its layers.
    """

    def __init__(self, host: Host, options: ModelOptions, spec: Any = None) -> None:
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

    def one_step(self, packs: Sequence[Pack], *, with_phase: bool) -> None:
        """The host's phase, and a training step."""
        if with_phase:
            self.model.eval()
            with torch.no_grad():
                if self.host.is_scheduled:
                    self.forward_backward(packs, forward_only=True)
                else:
                    for pack in packs:
                        self.call(pack, self.chunk)
            self.model.train()
        self.forward_backward(packs)
        self.update()


def measure_host(
    host: Host,
    options: ModelOptions = MODEL,
    steps: int = HOST_STEPS,
    *,
    transformer_engine: bool = False,
    **plugin: Any,
) -> Answer:
    """The report of a training.

    Args:
        host: how the model is called.
        options: of the model.
        steps: of training.
        transformer_engine: layers of its modules, otherwise ours.
        plugin: further options of the plugin.
    """
    install_for(options.max_tokens, DOCUMENTS, **plugin)
    try:
        trainer = _HostTrainer(host, options, spec=spec_of(transformer_engine))
        packs = canonical_packs(options.max_tokens, options.max_tokens // 2, steps * MICRO_BATCHES)
        shortened = map(partial(_without_last, every=3), enumerate(packs))
        for step in range(steps):
            of_step = list(itertools.islice(shortened, MICRO_BATCHES))
            trainer.one_step(of_step, with_phase=step % host.every == 0)
        (report,) = megatron.reports()
        return dict(report)
    finally:
        megatron.uninstall()


def _without_last(numbered: tuple[int, Pack], every: int) -> Pack:
    """Two of three packs lack their last document, so that they have fewer rows than the capacity."""
    index, pack = numbered
    if index % every == 0:
        return pack
    ends = pack.cu_seqlens[:-1]
    return Pack(tokens=pack.tokens[: int(ends[-1])], cu_seqlens=ends, max_seqlen=int(ends.diff().max()))
