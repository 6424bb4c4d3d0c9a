# SPDX-License-Identifier: Apache-2.0
"""Packs, steps and whole runs for the tests of the Megatron floor, and how two runs are compared."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import ModelOptions, Trainer, gpt_model, in_half_precision, transformer_config
from megagraph.megatron import seams

VOCAB = 64
LAYERS = 2
# Only the device's own attention needs bfloat16.
OPTIONS = ModelOptions(
    layers=LAYERS, hidden=32, heads=2, vocab=VOCAB, max_tokens=64, bf16=torch.cuda.is_available()
)
HYBRID_PATTERN = "*-*-"
CAPACITY = Capacity(tokens=64, num_seqs=5, max_seqlen=64)


def graph_config(**changes: Any) -> GraphConfig:
    """One capacity, one warm-up step, no progress bar; changed by keyword."""
    defaults = {"capacities": (CAPACITY,), "cuda_graph_warmup_steps": 1, "progress": False}
    return GraphConfig(**{**defaults, **changes})


@dataclass(frozen=True, kw_only=True)
class Micro:
    """One micro-batch.

    Args:
        lengths: valid tokens of each document.
        seed: of the tokens.
        padded: physical rows of each document; None where the pack carries no padded offsets.
        tail: rows past the last offset.
        tail_token: what stands in those rows.
        mask_seed: of its padding mask; None where it has none.
    """

    lengths: tuple[int, ...]
    seed: int = 0
    padded: tuple[int, ...] | None = None
    tail: int = 0
    tail_token: int = 0
    mask_seed: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Physical rows of each document."""
        return self.padded or self.lengths

    @property
    def physical(self) -> int:
        """Physical rows of the pack."""
        return sum(self.rows) + self.tail

    @property
    def longest(self) -> int:
        """Rows of the longest document."""
        return max(self.rows)

    def documents(self) -> list[Tensor]:
        """The tokens of each document; the last token of the vocabulary never occurs."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(0, VOCAB - 1, (length,), generator=generator) for length in self.lengths]

    def row_lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, labels, loss mask and positions, each [physical]."""
        tokens = torch.full((self.physical,), self.tail_token)
        labels, positions = torch.zeros(self.physical, dtype=torch.int64), torch.zeros_like(tokens)
        mask = torch.zeros(self.physical)
        start = 0
        for document, rows in zip(self.documents(), self.rows, strict=True):
            length = document.numel()
            tokens[start : start + rows] = 0
            tokens[start : start + length] = document
            last = start + max(length - 1, 0)
            labels[start:last] = document[1:]
            mask[start:last] = 1.0
            positions[start : start + rows] = torch.arange(rows)
            start += rows
        return tokens, labels, mask, positions

    def padding_mask(self) -> Tensor | None:
        """One row in four, bool [1, physical], wherever it lies; the tail is masked no more than the rest."""
        if self.mask_seed is None:
            return None
        generator = torch.Generator().manual_seed(self.mask_seed)
        return torch.rand(1, self.physical, generator=generator) < 0.25

    def params(self, device: torch.device) -> Any:
        """Its `PackedSeqParams`."""
        from megatron.core.packed_seq_params import PackedSeqParams

        def offsets(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

        actual = offsets(self.lengths)
        padded = None if self.padded is None else offsets(self.padded)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=actual,
            cu_seqlens_kv=actual,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )


def _loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    masked = losses.float().view(-1).where(mask > 0, 0.0)
    return masked.sum() / mask.sum().clamp(min=1), {"losses": masked.detach().clone()}


def forward(model: Any, micro: Micro, device: torch.device) -> tuple[Tensor, Any]:
    """Calls the model on a micro-batch. Returns the losses and what reduces them."""
    tokens, labels, mask, positions = (t.to(device) for t in micro.row_lists())
    padding = micro.padding_mask()
    losses = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=None,
        labels=labels[None],
        packed_seq_params=micro.params(device),
        **({} if padding is None else {"padding_mask": padding.to(device)}),
    )
    return losses, partial(_loss, mask=mask)


def schedule(
    model: Any, micros: Iterable[Micro], count: int, device: torch.device, *, forward_only: bool = False
) -> list[Tensor]:
    """Megatron's own schedule over `count` micro-batches. Returns the losses of each, a row a token."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[Micro], chunk: Any) -> tuple[Tensor, Any]:
        return forward(chunk, next(data), device)

    results: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micros),
        model=[model],
        num_microbatches=count,
        seq_length=OPTIONS.max_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return [result["losses"] for result in results]


def grads(chunk: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient: Megatron's `main_grad`, else `.grad`."""
    found = {name: getattr(param, "main_grad", param.grad) for name, param in chunk.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def weights(chunk: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: param.detach().clone() for name, param in chunk.named_parameters()}


@dataclass(kw_only=True)
class Step:
    """What one step left."""

    losses: list[Tensor]
    grads: dict[str, Tensor]


def step(trainer: Trainer, micros: Sequence[Micro], *, update: bool = True, eager: bool = False) -> Step:
    """One training step; `eager` switches graphs off for it."""
    trainer.zero_grad()
    with megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
        losses = schedule(trainer.model, micros, len(micros), trainer.device)
    left = Step(losses=losses, grads=grads(trainer.chunk))
    if update:
        trainer.update()
    return left


def evaluate(trainer: Trainer, micros: Sequence[Micro], *, eager: bool = False) -> list[Tensor]:
    """One evaluation step, as Megatron's loops make it."""
    trainer.model.eval()
    try:
        with torch.no_grad(), megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
            return schedule(trainer.model, micros, len(micros), trainer.device, forward_only=True)
    finally:
        trainer.model.train()


class HybridTrainer(Trainer):
    """The reference loop around a HybridModel; a MambaModel before 0.18."""

    def __init__(
        self,
        *,
        pattern: str = HYBRID_PATTERN,
        spec: Any = None,
        position: str = "rope",
        options: ModelOptions = OPTIONS,
        **further: Any,
    ) -> None:
        self._pattern, self._position = pattern, position
        super().__init__(dataclasses.replace(options, layers=len(pattern)), spec=spec, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        hybrid = seams.hybrid_seams()
        assert hybrid is not None
        forward, _stack = hybrid
        old = forward is seams.MAMBA_FORWARD
        model: nn.Module = forward.owner()(
            config,
            megagraph.get_hybrid_stack_varlen_spec() if spec is None else spec,
            vocab_size=self.options.vocab,
            max_sequence_length=self.options.max_tokens,
            position_embedding_type=self._position,
            **{"hybrid_override_pattern" if old else "hybrid_layer_pattern": self._pattern},
        )
        return model


def te_layer_spec(**given: Any) -> Any:
    """Megatron's layer of Transformer Engine's modules; takes what Megatron's function takes."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(**given)


def plain_model(seed: int) -> tuple[nn.Module, nn.Module]:
    """A GPTModel that no DDP has seen, and what is called in its place."""
    torch.manual_seed(seed)
    model = gpt_model(OPTIONS, transformer_config(OPTIONS))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model, in_half_precision(model)


@dataclass(kw_only=True)
class Run:
    """A whole run: every step, and what it left behind."""

    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    rng: list[Tensor] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict, compare=False)


def rng_state() -> list[Tensor]:
    """The state of torch's default generators."""
    device = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *device]


def report_of(trainer: Trainer) -> dict[str, Any]:
    """The report of the only model, whose calls are all accounted for."""
    (report,) = megagraph.reports()
    assert report["calls"] == report["replays"] + sum(report["eager"].values())
    return report


def train(
    config: GraphConfig,
    steps: Sequence[Sequence[Micro]],
    *,
    eager: bool = False,
    transformer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **changes: Any,
) -> Run:
    """Trains a fresh model under `config`; the same arguments begin with the same weights.

    Args:
        config: installed for this run alone.
        steps: the micro-batches of each step.
        eager: switch graphs off in every step.
        transformer: further fields of Megatron's config.
        ddp: further fields of Megatron's DDP config.
        changes: of the model's options.
    """
    run = Run()
    megagraph.install(config)
    try:
        trainer = Trainer(dataclasses.replace(OPTIONS, **changes), config=transformer, ddp=ddp)
        for micros in steps:
            run.steps.append(step(trainer, micros, eager=eager))
            run.report = report_of(trainer)
        run.weights = weights(trainer.chunk)
        run.rng = rng_state()
    finally:
        megagraph.uninstall()
    return run


class Pair:
    """Two models of the same weights in one process: one trains eager, the other with graphs."""

    def __init__(self, *, layers: int = LAYERS, **further: Any) -> None:
        options = dataclasses.replace(OPTIONS, layers=layers)
        self.eager, self.graphed = Trainer(options, **further), Trainer(options, **further)

    @property
    def both(self) -> tuple[Trainer, Trainer]:
        """First the eager one."""
        return self.eager, self.graphed

    def each(self, work: Callable[[Trainer], Any]) -> list[Any]:
        """What the same work leaves of each, on the first without graphs."""
        with megagraph.disable_cuda_graphs_this_step():
            first = work(self.eager)
        return [first, work(self.graphed)]

    def step(self, *micros: Micro, times: int = 1) -> None:
        """Steps of both, which must leave the same bits."""
        for _ in range(times):
            one = step(self.eager, micros, eager=True)
            assert_same_bits(one, step(self.graphed, micros))

    def evaluate(self, *micros: Micro) -> None:
        """An evaluation of both, which must leave the same bits."""
        pairs = zip(evaluate(self.eager, micros, eager=True), evaluate(self.graphed, micros), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    def report(self) -> dict[str, Any]:
        """Of the graphed one; the eager one must not have replayed."""
        eager, graphed = megagraph.reports()
        assert eager["replays"] == 0
        for report in (eager, graphed):
            assert report["calls"] == report["replays"] + sum(report["eager"].values())
        return graphed
