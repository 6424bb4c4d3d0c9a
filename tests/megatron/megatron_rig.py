# SPDX-License-Identifier: Apache-2.0
"""Packs, steps and whole runs for the tests of the Megatron floor, and how two runs are compared."""

import dataclasses
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from model_specs import asks_for_no_engine, mla_config, spec_of
from offsets import offsets, pack_of
from same_bits import assert_same_bits
from sharded_sgd import ShardedSGD
from streams import seed_streams
from torch import Tensor, nn

import megagraph
from megagraph._C import Capacity
from megagraph.config import GraphConfig
from megagraph.demo.trainer import ModelOptions, Trainer
from megagraph.megatron import seams
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.megatron.specs import with_grouped_experts
from megagraph.reasons import EagerReason

Install = Callable[..., None]  # the fixture `install`
VOCAB = 64
LAYERS = 2
ON_GPU = torch.cuda.is_available()
# Only the device's own attention needs bfloat16.
OPTIONS = ModelOptions(layers=LAYERS, hidden=32, heads=2, vocab=VOCAB, max_tokens=64, bf16=ON_GPU)
HYBRID_PATTERN = "*-*-"
CAPACITY = Capacity(tokens=64, num_seqs=5, max_seqlen=64)


def graph_config(**changes: Any) -> GraphConfig:
    """One capacity, one warm-up step, no progress bar; changed by keyword."""
    defaults = {"capacities": (CAPACITY,), "cuda_graph_warmup_steps": 1, "progress": False}
    return GraphConfig(**{**defaults, **changes})


@dataclass(frozen=True, kw_only=True)
class Micro:
    lengths: tuple[int, ...]  # valid tokens of each document
    seed: int = 0  # of the tokens
    padded: tuple[int, ...] | None = None  # physical rows of each document, if its offsets are padded
    tail: int = 0  # rows past the last offset
    tail_token: int = 0  # what stands in those rows
    mask_seed: int | None = None  # of its padding mask, if it has one
    pack: Callable[[Any], Any] = lambda made: made  # what a host makes of its pack

    @property
    def rows(self) -> tuple[int, ...]:
        return self.padded or self.lengths

    @property
    def physical(self) -> int:
        return sum(self.rows) + self.tail

    @property
    def longest(self) -> int:
        return max(self.rows)

    def documents(self) -> list[Tensor]:
        """The tokens of each document; the last token of the vocabulary never occurs."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randint(0, VOCAB - 1, (length,), generator=generator) for length in self.lengths]

    def row_lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, labels, loss mask and positions, each [physical]."""
        tokens = torch.full((self.physical,), self.tail_token)
        labels, positions = torch.zeros(self.physical, dtype=torch.int64), torch.zeros_like(tokens)
        mask, start = torch.zeros(self.physical), 0
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

    def position_ids(self) -> Tensor:
        return self.row_lists()[3][None]

    def padding_mask(self) -> Tensor | None:
        """One row in four, bool [1, physical], wherever it lies; the tail is masked no more than the rest."""
        if self.mask_seed is None:
            return None
        generator = torch.Generator().manual_seed(self.mask_seed)
        return torch.rand(1, self.physical, generator=generator) < 0.25

    def given(self, device: torch.device) -> dict[str, Any]:
        """What a model is called with, by name."""
        tokens, labels, _mask, _positions = (rows[None].to(device) for rows in self.row_lists())
        padding = self.padding_mask()
        return {
            "input_ids": tokens,
            "position_ids": self.position_ids().to(device),
            "attention_mask": None,
            "labels": labels,
            "packed_seq_params": self.params(device),
            **({} if padding is None else {"padding_mask": padding.to(device)}),
        }

    def params(self, device: torch.device) -> Any:
        padded = None if self.padded is None else offsets(self.padded, device)
        return self.pack(packed(offsets(self.lengths, device), padded, max_seqlen_q=self.longest))


def packed(actual: Tensor, padded: Tensor | None = None, **fields: Any) -> Any:
    """`PackedSeqParams` of offsets, the same for queries and keys."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(**vars(pack_of(actual, padded, **fields)))


def split(pack: Any) -> Any:
    """Queries and keys have offsets of their own, for all that anybody can tell without waiting."""
    return dataclasses.replace(pack, cu_seqlens_kv=pack.cu_seqlens_kv.clone())


ONE, TWO, OTHER = Micro(lengths=(9, 20)), Micro(lengths=(3, 30, 8), seed=1), Micro(lengths=(50,), seed=2)


def mean_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    masked = losses.float().view(-1).where(mask > 0, 0.0)
    return masked.sum() / mask.sum().clamp(min=1), {"losses": masked.detach().clone()}


def forward(model: Any, micro: Micro, device: torch.device) -> tuple[Tensor, Any]:
    """Calls the model on a micro-batch, or makes its plan. Returns the losses and what reduces them."""
    return model(**micro.given(device)), partial(mean_loss, mask=micro.row_lists()[2].to(device))


def run_schedule(model: Any, forward_step: Any, data: Any, count: int, **options: Any) -> list[Any]:
    """Megatron's own schedule over `count` micro-batches. Returns what each leaves."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    given = {"forward_only": False, "seq_length": OPTIONS.max_tokens, "micro_batch_size": 1, **options}
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=[model],
        num_microbatches=count,
        **given,
    )


def schedule(model: Any, micros: Iterable[Micro], count: int, device: Any, **options: Any) -> list[Tensor]:
    """The schedule over plain micro-batches. Returns the losses of each, a row a token."""

    def forward_step(data: Any, chunk: Any, return_schedule_plan: bool = False) -> tuple[Tensor, Any]:
        return forward(chunk.build_schedule_plan if return_schedule_plan else chunk, next(data), device)

    return [result["losses"] for result in run_schedule(model, forward_step, micros, count, **options)]


def grads(chunk: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient: Megatron's `main_grad`, else `.grad`."""
    found = {name: getattr(param, "main_grad", param.grad) for name, param in chunk.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def weights(chunk: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in chunk.named_parameters()}


def metrics() -> dict[str, Tensor]:
    """What Megatron's tracker of routers holds, by name; empties it as Megatron's log does."""
    found = {name: values.clone() for name, values in seams.moe_metrics().items()}
    for values in seams.moe_metrics().values():
        values.zero_()
    return found


def forget_metrics() -> None:
    """Before a run: nothing has been recorded yet."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # 0.16
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


@dataclass(kw_only=True)
class Step:
    """What one step left, and what experts and predicted tokens counted in it."""

    losses: list[Tensor]  # of each micro-batch, a row a token
    grads: dict[str, Tensor]  # of each parameter
    metrics: dict[str, Tensor] = field(default_factory=dict)  # of routers, by name, of each layer
    counts: list[Tensor] = field(default_factory=list)  # tokens of each expert of each layer
    bias: list[Tensor] = field(default_factory=list)  # of the experts, afterwards
    logged: dict[str, Tensor] = field(default_factory=dict)  # what Megatron logs of predicted tokens


def step(
    trainer: Trainer,
    micros: Any,  # as many as its length says, or `count`
    count: int | None = None,
    *,
    update: bool = True,
    eager: bool = False,  # without graphs
    adds: bool = False,  # to the gradients that there are
    times: int = 1,
) -> Step:
    """Training steps, of which the last one is returned."""
    for _ in range(times - 1):
        step(trainer, micros, update=update, eager=eager)
    if not adds:
        trainer.zero_grad()
    with megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
        losses = schedule(trainer.model, micros, len(micros) if count is None else count, trainer.device)
    left = Step(losses=losses, grads=grads(trainer.chunk))
    if update:
        trainer.update()
    return dataclasses.replace(left, **getattr(trainer, "counted", dict)())


@contextmanager
def evaluating(model: nn.Module, *, in_training: bool = False) -> Iterator[None]:
    """Without gradients, and in evaluation mode unless it is said; in the mode of before afterwards."""
    before = model.training
    model.train(in_training)
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


def evaluate(trainer: Trainer, micros: Sequence[Micro], *, eager: bool = False) -> list[Tensor]:
    """One evaluation step, as Megatron's loops make it."""
    with evaluating(trainer.model), megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
        return schedule(trainer.model, micros, len(micros), trainer.device, forward_only=True)


@contextmanager
def unsynchronized(trainer: Trainer) -> Iterator[None]:
    """No gradient is reduced inside, as a host says it that makes several schedule calls a step."""
    config = trainer.chunk.config
    before = config.no_sync_func, config.finalize_model_grads_func
    config.no_sync_func = config.finalize_model_grads_func = None
    try:
        with trainer.model.no_sync():
            yield
    finally:
        config.no_sync_func, config.finalize_model_grads_func = before


_SHAPE = {field.name for field in dataclasses.fields(ModelOptions)}


class ModelTrainer(Trainer):
    """The reference loop around any kind of model. Keeps what its routers and predicted tokens count."""

    def __init__(
        self,
        *,
        options: ModelOptions = OPTIONS,
        kinds: str = "",  # of its layers: `E` has experts, `-` has none
        pattern: str = "",  # of a HybridModel, a MambaModel before 0.18; of a GPTModel there is none
        mla: str = "",  # which multi-latent attention, of `model_specs.KINDS`
        engine: bool = False,  # layers of Transformer Engine's modules
        is_grouped: bool = False,  # experts that never wait for the device
        prepare: Callable[[Any], Any] = lambda chunk: None,  # done to the model before DDP sees it
        arguments: Callable[[Any], dict[str, Any]] = lambda config: {},  # further ones of the model
        config: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        spec: Any = None,
        **changes: Any,  # of the model's shape, or else of Megatron's config
    ) -> None:
        self._kinds, self._pattern, self._engine, self._is_grouped = kinds, pattern, engine, is_grouped
        self._prepare, self._arguments = prepare, arguments
        self.counts: list[Tensor] = []
        if engine:
            seed_streams()
        layers = pattern.split("/")[0] or kinds
        shape = {"layers": len(layers)} if layers else {}
        shape |= {"heads": 4} if mla and not pattern else {}
        shape |= {name: changes.pop(name) for name in _SHAPE & changes.keys()}
        config = {**(mla_config(mla) if mla else {}), **(config or {}), **changes}
        config = {"finalize_model_grads_func": self._finalize, **config}
        super().__init__(dataclasses.replace(options, **shape), config=config, ddp=ddp, spec=spec)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        from megatron.core.models.gpt import GPTModel

        given = {"vocab_size": self.options.vocab, "max_sequence_length": self.options.max_tokens}
        given |= {"position_embedding_type": "rope", **self._arguments(config)}
        kind: Any = GPTModel
        if self._pattern:
            forward, _stack = seams.hybrid_seams() or ()
            old = forward is seams.MAMBA_FORWARD
            given["hybrid_override_pattern" if old else "hybrid_layer_pattern"] = self._pattern
            kind = forward.owner()
        with asks_for_no_engine():
            if spec is None:
                spec = spec_of(config, self._kinds, self._pattern, engine=self._engine)
            chunk: nn.Module = kind(config, with_grouped_experts(spec) if self._is_grouped else spec, **given)
        self._prepare(chunk)
        return chunk

    def make_optimizer(self) -> Any:
        is_sharded = self.model.ddp_config.overlap_param_gather and not ON_GPU
        return ShardedSGD(self.model) if is_sharded else super().make_optimizer()

    def routers(self) -> list[Any]:
        mixtures = (getattr(layer, "mlp", None) for layer in self.chunk.decoder.layers)
        return [mixture.router for mixture in mixtures if hasattr(mixture, "router")]

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        counts = (router.local_tokens_per_expert for router in self.routers())
        self.counts = [each.clone() for each in counts if each is not None]
        finalize_model_grads(*args, **kwargs)

    def counted(self) -> dict[str, Any]:
        """What a step has left in routers and trackers."""
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        bias = [it.expert_bias.clone() for it in self.routers() if it.expert_bias is not None]
        tracker = MTPLossLoggingHelper.tracker
        logged = {name: value.clone() for name, value in tracker.items() if isinstance(value, Tensor)}
        tracker.clear()
        return {"metrics": metrics(), "counts": self.counts, "bias": bias, "logged": logged}


HybridTrainer = partial(ModelTrainer, pattern=HYBRID_PATTERN)


def around_mlps(wrapper: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    def prepare(chunk: Any) -> None:
        for layer in chunk.decoder.layers:
            layer.mlp = wrapper(layer.mlp)

    return prepare


def changes_output(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """From now on a module hands out what `change` makes of its output; no hook shows it."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out, *others = original(*args, **kwargs)
        return change(out), *others

    module.forward = forward


def hands(module: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """From now on a module is handed by name what `change` makes of that, until the handle is removed."""
    return module.register_forward_pre_hook(lambda _it, args, given: (args, change(given)), with_kwargs=True)


def breaks(module: Any, when: Callable[[], bool] | None = None) -> None:
    """From now on a module raises when it is captured, or when `when` says so, behind all that it does."""

    def fail(out: Tensor) -> Tensor:
        if (when or is_capturing)():
            raise ArithmeticError("an injected failure")
        return out

    changes_output(module, fail)


@dataclass(kw_only=True)
class Run:
    """A whole run: every step, evaluations between them, and what it left behind."""

    steps: list[Step] = field(default_factory=list)
    evaluated: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    rng: list[Tensor] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict, compare=False)


def report_of(trainer: Trainer) -> dict[str, Any]:
    """The report of the only model."""
    (report,) = megagraph.reports()
    return report


FIGURES = {"graphs", "calls", "layers", "sites", "verified", "unverified"}


def ran(report: Any, replays: int | None = None, *, failures: int = 0, **counts: int) -> dict[str, Any]:
    """A report with these layer calls that replayed and, by their reasons, that ran eager, and no others.
    What is named like one of the report's figures is that figure."""
    found = {**report, **report["verification"]}
    figures = {"replays": replays, **{name: counts.pop(name) for name in FIGURES & counts.keys()}}
    assert report["eager"] == counts and len(report["failures"]) == failures, report["failures"]
    for name, expected in figures.items():
        assert expected in (None, found[name]), name
    return report


def eager_since(after: dict[str, Any], before: dict[str, Any]) -> dict[str, int]:
    """Calls between two reports of a model that ran eager, by their reasons."""
    found = {reason: count - before["eager"].get(reason, 0) for reason, count in after["eager"].items()}
    return {reason: count for reason, count in found.items() if count}


Make = Callable[..., Trainer]
Around = Callable[[Trainer, int], AbstractContextManager[None]]


def at(step: int, act: Callable[[Trainer], Any]) -> Around:
    """Acts before one step, counted from 0; what `act` answers is entered around it, if it is a context."""

    def around(trainer: Trainer, index: int) -> AbstractContextManager[None]:
        return (act(trainer) if index == step else None) or nullcontext()

    return around


def train(
    plugin: GraphConfig | None,  # installed for this run alone; None for Megatron alone
    steps: Sequence[Sequence[Micro]],  # the micro-batches of each step
    make: Make = ModelTrainer,  # makes the trainer
    *,
    eager: bool = False,  # switch graphs off in every step
    evaluate_at: Collection[int] | Mapping[int, Sequence[Micro]] = (),  # what, or the first step's packs
    around: Around = lambda trainer, index: nullcontext(),  # entered around each step
    **given: Any,  # to `make`
) -> Run:
    """Trains a fresh model; the same arguments begin with the same weights."""
    run = Run()
    forget_metrics()
    if plugin is not None:
        megagraph.install(plugin)
    try:
        trainer = make(**given)
        for index, micros in enumerate(steps):
            if index in evaluate_at:
                packs = evaluate_at[index] if isinstance(evaluate_at, Mapping) else steps[0]
                run.evaluated += evaluate(trainer, packs, eager=eager)
            with around(trainer, index):
                run.steps.append(step(trainer, micros, eager=eager))
            if plugin is not None and plugin.mode != "off":
                run.report = report_of(trainer)
        run.rng = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if ON_GPU else [])]
        if not trainer.model.ddp_config.overlap_param_gather:  # else some are still on their way
            run.weights = weights(trainer.chunk)
    finally:
        megagraph.uninstall()
    return run


def kept(runs: dict[str, tuple[Run, Any]], train: Callable[..., Run], *of: Any, **given: Any) -> Run:
    """What `train` leaves of these arguments, which is called once for each."""
    name = repr((of, given))
    if name not in runs:
        runs[name] = train(*of, **given), given  # alive, so that no other object is called the same
    return runs[name][0]


def compare_runs(
    steps: Sequence[Sequence[Micro]],
    make: Make = ModelTrainer,
    plugin: dict[str, Any] | None = None,  # options of `graph_config()`
    *,
    tamper: Around = lambda trainer, index: nullcontext(),  # entered around each step of the graphed run
    shared: dict[str, tuple[Run, Any]] | None = None,
    **given: Any,
) -> Run:
    """Trains in mode `eager` and with graphs, which must leave the same bits. Returns the graphed run.
    `shared` has runs in mode `eager` that serve further comparisons of the same steps and models."""
    options, runs = plugin or {}, {} if shared is None else shared
    eager = kept(runs, partial(train, graph_config(**{**options, "mode": "eager"})), steps, make, **given)
    assert eager.report["replays"] == eager.report["graphs"] == 0
    graphed = train(graph_config(**options), steps, make, **{"around": tamper, **given})
    assert_same_bits(eager, graphed)
    return graphed


class Pair:
    """Two models of the same weights: one trains eager, the other with graphs, by options of the plugin."""

    def __init__(self, make: Make = ModelTrainer, *, plugin: Any = None, **given: Any) -> None:
        if installed_plugin() is None:
            megagraph.install(graph_config(**(plugin or {})))
        self.eager, self.graphed = make(**given), make(**given)

    @property
    def both(self) -> tuple[Any, Any]:
        """First the eager one."""
        return self.eager, self.graphed

    def each(self, work: Callable[[Any], Any]) -> list[Any]:
        """What the same work leaves of each, on the first without graphs."""
        with megagraph.disable_cuda_graphs_this_step():
            first = work(self.eager)
        return [first, work(self.graphed)]

    def step(self, *micros: Micro, times: int = 1, **options: Any) -> Step:
        """Steps of both, which must leave the same bits. Returns what the last one left."""
        for _ in range(times):
            one = step(self.eager, micros, eager=True, **options)
            other = step(self.graphed, micros, **options)
            assert_same_bits(one, other)
        return other

    def train(self, steps: Iterable[Sequence[Micro]]) -> dict[str, Any]:
        """A step of both for each list of packs. Returns the report of the graphed one."""
        for micros in steps:
            self.step(*micros)
        return self.report()

    def costs(self, *micros: Micro, **options: Any) -> dict[str, int]:
        """Calls that steps of both ran eager, by their reasons."""
        before = self.report() if megagraph.reports() else {"eager": {}}  # none before the first step
        self.step(*micros, **options)
        return eager_since(self.report(), before)

    def evaluate(self, *micros: Micro) -> None:
        """An evaluation of both, which must leave the same bits."""
        assert_same_bits(evaluate(self.eager, micros, eager=True), evaluate(self.graphed, micros))

    def report(self) -> dict[str, Any]:
        """Of the graphed one; the eager one must not have replayed."""
        eager, graphed = megagraph.reports()
        assert eager["replays"] == 0
        return graphed

    def ran(self, replays: int | None = None, **counts: int) -> dict[str, Any]:
        return ran(self.report(), replays, **counts)


def steps_of(
    count: int,
    *,
    masks: bool = False,  # of each
    tails: bool = True,  # of every second one, of up to half the capacity
    align: int = 1,  # of physical rows of each document
    make: Any = Micro,
    **given: Any,
) -> list[list[Any]]:
    """Steps of three packs, no two alike."""

    def pack(index: int) -> Any:
        lengths = tuple(4 + (5 * index + 7 * place) % 9 for place in range(1 + index % 5))
        padded = tuple(-(-length // align) * align for length in lengths) if align > 1 else None
        tail = (7 * index) % (CAPACITY.tokens - sum(padded or lengths)) if tails and index % 2 else 0
        mask_seed = index if masks else None
        return make(lengths=lengths, padded=padded, seed=index, tail=tail, mask_seed=mask_seed, **given)

    return [[pack(3 * number + place) for place in range(3)] for number in range(count)]


def refused(model: Any, *given: Any, **options: Any) -> str:
    """The sentence with which a model is refused, under the reason of what is not supported."""
    refusal = refusal_of(model, *(given or (None,)), **options)
    assert refusal is not None and refusal.reason is EagerReason.SCOPE_UNSUPPORTED
    return refusal.sentence


def is_capturing() -> bool:
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    return bool(is_graph_capturing())


def the_plugin() -> Any:
    plugin = installed_plugin()
    assert plugin is not None
    return plugin


needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
)
