# SPDX-License-Identifier: Apache-2.0
"""Host time of the same layers: replayed by us, eager, and in graphs of torch, Megatron, Transformer Engine.

And what a model call that runs eager costs beside one without the plugin.

The rows of others are one unpacked document: without Transformer Engine's kernels no graphs of others take
packs. Everybody accumulates into Megatron DDP's `main_grad`, but for Transformer Engine's layers, which have
no DDP.
"""

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import megagraph
from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import Phases, host_seconds, in_turns, phases_us, wall_ms
from benchmarks.measuring.results import differences
from benchmarks.subjects.hosts import check_replays, install_for, made_quickly, prepare_rival
from benchmarks.subjects.inside import Ends, Replays, bare_loops, graphs_of
from benchmarks.subjects.packs import a_pack, hidden_states, model_options, variant_of
from megagraph.bank.bank import Bank
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import ModelOptions, Trainer, packed_seq_params
from megagraph.megatron.plugin import disable_cuda_graphs_this_step

LAYERS, HIDDEN, TOKENS = 24, 1024, 256
_MICRO_BATCHES = 2
ROUNDS = 60  # of ours
LAST_ROUNDS = 200  # reductions take turns with the host, so that a last micro-batch varies most
MICRO_BATCHES = 20  # in a row


class DenseTrainer(Trainer):
    """Trains on the tokens of packs as one document, with no pack."""

    def _forward_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        tokens = next(packs).tokens.unsqueeze(0).to(self.device)
        positions = torch.arange(tokens.size(1), device=self.device).unsqueeze(0)
        losses = model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=tokens)
        return losses, lambda losses: (loss := losses.float().mean(), {"loss": loss.detach().clone()})


def layer_calls(trainer: Trainer, packs: Sequence[Pack]) -> list[Callable[[Tensor], Tensor]]:
    """Call Megatron's layers with what its block hands to them beside the hidden states.

    Runs one step to see it.
    """
    layer, found = trainer.chunk.decoder.layers[0], dict[str, Any]()
    original = type(layer).__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is layer:
            found.update(kwargs)
        return original(self, *args, **kwargs)

    with mock.patch.object(type(layer), "__call__", call):
        trainer.forward_backward(packs)
    found.pop("hidden_states", None)

    def called(layer: nn.Module, hidden: Tensor) -> Tensor:
        out: Tensor = layer(hidden_states=hidden, **found)[0]
        return out

    return [partial(called, layer) for layer in trainer.chunk.decoder.layers]


def time_layers(layers: Sequence[Callable[[Tensor], Tensor]], options: ModelOptions) -> Answer:
    """Host times of a stack's passes for each layer, by `forward` and `backward`, the device idle before."""
    hidden = hidden_states(options.max_tokens, options.hidden)
    grad, outs = torch.randn_like(hidden) * 1e-3, list[Tensor]()

    def forward() -> None:
        out = hidden
        for layer in layers:
            out = layer(out)
        outs.append(out)

    def sample() -> Phases:
        outs.clear()
        forward_seconds = host_seconds(forward)
        backward_seconds = host_seconds(lambda: torch.autograd.backward(outs[0], grad))
        return {"forward": forward_seconds, "backward": backward_seconds}

    return dict(phases_us(sample, repeats=30, divisor=options.layers))


def torchs_graphs(options: ModelOptions) -> Answer:
    """Megatron's layers with `torch.cuda.make_graphed_callables`; its warm-up counts as capture."""
    # On a side stream: gradient accumulators of the current one cannot be captured on another.
    trainer = made_quickly(DenseTrainer, options, beside=True)
    calls = layer_calls(trainer, [a_pack(options.max_tokens)])
    layers = tuple(nn.ModuleList([layer]) for layer in trainer.chunk.decoder.layers)  # with the parameters
    for layer, call in zip(layers, calls, strict=True):
        layer.forward = call
    return _graphed(torch.cuda.make_graphed_callables, layers, options)


def _graphed(make: Callable[..., Any], layers: tuple[nn.Module, ...], options: ModelOptions) -> Answer:
    """Captures layers, and times them: `forward`, `backward`, and ms of the `capture` of a graph."""
    shape, graphed = (options.max_tokens, options.hidden), list[Any]()
    samples = tuple((hidden_states(*shape),) for _ in layers)
    capture_ms = wall_ms(lambda: graphed.extend(make(layers, samples)))
    return {**time_layers(graphed, options), "capture": capture_ms / (2 * len(layers))}


def megatrons_graphs(options: ModelOptions) -> Answer:
    """Trains with Megatron's own graphs of layers until they replay, and times them as `_graphed()`.

    Only one model of a process can have them, and they change the process's streams.
    """
    from megatron.core.transformer import cuda_graphs

    record: Any = cuda_graphs._CudagraphGlobalRecord
    create, created = record.create_cudagraphs, list[float]()

    def timed_create() -> Any:
        graphs, stats = len(record.cudagraph_record), list[Any]()
        capture_ms = wall_ms(lambda: stats.append(create()))
        if graphs:
            created.append(capture_ms / graphs)
        return stats[0]

    prepare_rival(_MICRO_BATCHES)
    config = {"cuda_graph_impl": "local", "cuda_graph_modules": []}
    trainer = made_quickly(DenseTrainer, options, config=config)
    packs = [a_pack(options.max_tokens)] * _MICRO_BATCHES
    with mock.patch.object(record, "create_cudagraphs", timed_create):
        for _ in range(2):
            trainer.forward_backward(packs)
    if not created:
        raise RuntimeError("Megatron created no graphs")
    return {**time_layers(layer_calls(trainer, packs), options), "capture": created[-1]}


def transformer_engines_graphs(options: ModelOptions) -> Answer:
    """Transformer Engine's own layers in its graphs; unpacked, and with no DDP around them."""
    import transformer_engine.pytorch as te

    shape = (options.hidden, 4 * options.hidden, options.heads)
    more = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    layers = tuple(
        te.TransformerLayer(*shape, layer_number=index + 1, params_dtype=torch.bfloat16, **more).cuda()
        for index in range(options.layers)
    )
    return _graphed(te.make_graphed_callables, layers, options)


# The rows of these are one unpacked document.
RIVALS: dict[str, Callable[[ModelOptions], Answer]] = {
    "torch.cuda.make_graphed_callables": torchs_graphs,
    "Megatron's graphs, local": megatrons_graphs,
    "Transformer Engine's make_graphed_callables": transformer_engines_graphs,
}


def capture(trainer: Trainer) -> dict[str, Any]:
    """Trains until every layer replays. Raises `RuntimeError` where one was not captured for a capacity.

    Returns the report.
    """
    packs = [a_pack(trainer.options.max_tokens)] * _MICRO_BATCHES
    for _ in range(3):  # one to warm up; before the second is the capture
        trainer.forward_backward(packs)
    report: dict[str, Any] = graphs_of(trainer).report()
    check_replays(report)
    if report["graphs"] != 2 * report["layers"] * len(report["capacities"]):
        raise RuntimeError(f"not every layer was captured: {report}")
    return report


def captured(options: ModelOptions, **further: Any) -> Trainer:
    """Installs the plugin; a trainer whose every layer replays."""
    install_for(options.max_tokens, 8, cuda_graph_warmup_steps=1)
    trainer = made_quickly(Trainer, options, **further)
    capture(trainer)
    return trainer


def measure_stack(options: ModelOptions) -> dict[str, Answer]:
    """A stack in micro-batches that are not a step's last, `graphed` and `eager`.

    Host times of each phase of a micro-batch for each layer; of `around` and `engine` for all together.
    `bare`: the same graphs launched by a loop in C; `decided`: the micro-batch's pack read and decided on;
    `around`: its begin and end; `in a row`: both, many times one after the other; `engine`: a backward pass
    of a single node that does nothing, and the time without that of it beside each backward.
    """
    trainer = captured(options)
    replays = Replays(trainer)
    bank, hidden, grad, layers = replays.bank, replays.hidden, replays.grad, len(replays.bank.sites)
    bare_forward, bare_backward = bare_loops(bank, replays.key)
    trainer.model.zero_grad_buffer()

    def micro_batches() -> None:
        for _ in range(MICRO_BATCHES):
            replays.end(replays.begun(replays.decided()))

    def sample() -> Phases:
        hot = host_seconds(micro_batches) / MICRO_BATCHES
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch = replays.decided()
        decided = time.perf_counter()
        replays.begun(batch)
        begun = time.perf_counter()
        out = bank.replay_all(hidden)
        done = time.perf_counter()
        replays.end(batch)
        ended = time.perf_counter()
        backward = host_seconds(lambda: out.backward(grad)) / layers
        engine = host_seconds(lambda: hidden.backward(grad))
        return {
            "forward": (done - begun) / layers,
            "decided": decided - start,
            "around": begun - decided + ended - done,
            "in a row": hot,
            "backward": backward,
            "backward without engine": backward - engine / layers,
            "engine": engine,
            "bare forward": host_seconds(bare_forward) / layers,
            "bare backward": host_seconds(bare_backward) / layers,
        }

    report = graphs_of(trainer).report
    counted = report()["replays"]
    graphed = phases_us(sample, repeats=ROUNDS)
    counted = report()["replays"] - counted
    if counted < ROUNDS * layers:
        raise RuntimeError(f"expected at least {ROUNDS * layers} replays, got {counted}")
    with disable_cuda_graphs_this_step():
        eager = time_layers(layer_calls(trainer, [a_pack(options.max_tokens)] * 2), options)
    return {"graphed": dict(graphed), "eager": eager}


def measure_last(options: ModelOptions) -> Answer:
    """The backward of a last micro-batch, us for each layer, and what of it is whose.

    On the calling thread, as in a schedule.
    `megatron` registers every gradient one by one with DDP, which reduces full buckets, and `bare` launches
    the same graphs by a loop in C; a backward pass of a single node that does nothing is nobody's `own`.
    """
    trainer = captured(options, ddp={"overlap_grad_reduce": True})
    ddp, replays = trainer.model, Replays(trainer)
    bank, hidden, grad = replays.bank, replays.hidden, replays.grad
    _forward, bare = bare_loops(bank, replays.key)
    layers = list(trainer.chunk.decoder.layers)
    params = [param for layer in reversed(layers) for param in reversed(list(layer.parameters()))]
    group_of = ddp.param_to_bucket_group

    def end_reductions() -> None:
        """And lets DDP count anew; the next micro-batch is a last one again."""
        for group in ddp.bucket_groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            group.reset()

    def register() -> None:
        for param in params:
            group_of[param].register_grad_ready(param, ddp.force_all_reduce)

    def sample() -> dict[str, float]:
        end_reductions()
        out = replays.replayed()
        with torch.autograd.set_multithreading_enabled(False):
            backward = host_seconds(lambda: out.backward(grad))
            engine = host_seconds(lambda: hidden.backward(grad))
        end_reductions()
        registered, launched = host_seconds(register), host_seconds(bare)
        own = backward - engine - registered - launched
        return {"backward": backward, "megatron": registered, "bare": launched, "own": own}

    return dict(phases_us(sample, repeats=LAST_ROUNDS, divisor=len(layers)))


# Name to (variants, slots).
BANKS = {"1 variant": (1, 1), "4 variants": (4, 1), "64 variants": (64, 1), "16 slots": (1, 16)}
SITES = 12  # 64 variants of them are 1,536 graphs
IN_A_ROUND = 16  # micro-batches of each bank
BANK_WARM_UP, BANK_ROUNDS = 4, 12  # in the first each of 64 variants has its first replay, then each three


def keys_of_round(index: int, *, variants: int, slots: int) -> list[int]:
    """The variants of a round, each for as many micro-batches in flight as there are slots."""
    flights = IN_A_ROUND // slots
    return [(index * flights + flight) % variants for flight in range(flights)]


class _Measured:
    """One bank of the modules, with every variant captured into every slot."""

    def __init__(self, layers: Sequence[nn.Module], variants: int, slots: int, hidden: Tensor) -> None:
        self._slots, self._variants = slots, variants
        self._hidden, self._grad = hidden, torch.randn_like(hidden) * 1e-3
        self.times = defaultdict[str, list[float]](list)
        self._bank = Bank(layers, hidden.device, num_slots=slots)
        self._bank.capture([variant_of(hidden, key=key) for key in range(variants)])
        if self._bank.failures:
            raise RuntimeError(f"capture failed: {self._bank.failures[0]}")
        places = [(key, slot) for key in range(variants) for slot in range(slots)]
        self._bare = {place: bare_loops(self._bank, *place) for place in places}

    def _time(self, phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what it answers: nothing is freed while the time is taken."""
        kept: list[Any] = []
        self.times[phase].append(host_seconds(lambda: kept.append(call(*arguments))))
        return kept[0]

    def run(self, index: int) -> None:
        """A round: in turns as many micro-batches in flight as there are slots, and their backwards."""
        for key in keys_of_round(index, variants=self._variants, slots=self._slots):
            outs: list[Tensor] = []
            for _ in range(self._slots):
                with self._bank.micro_batch(key) as reason:
                    if reason is not None:
                        raise RuntimeError(f"a micro-batch ran eager: {reason.name}")
                    outs.append(self._time("forward", self._bank.replay_all, self._hidden))
            while outs:
                self._time("backward", outs.pop(0).backward, self._grad)
                self._time("engine", self._hidden.backward, self._grad)
            for slot in range(self._slots):
                forward, backward = self._bare[key, slot]
                self._time("bare forward", forward)
                self._time("bare backward", backward)

    def answer(self) -> Answer:
        """Microseconds of each phase for each site, of backwards without the engine.

        Raises `RuntimeError` where anything ran eager.
        """
        counters, times = self._bank.counters(), self.times
        if counters["replays"] != counters["calls"]:
            raise RuntimeError(f"expected replays only, got {counters}")
        times["backward without engine"] = differences(times.pop("backward"), times.pop("engine"))
        return {phase: [second * 1e6 / SITES for second in seconds] for phase, seconds in times.items()}


def measure_banks() -> dict[str, Answer]:
    """Host time for each site of a bank, in turn in each of `BANKS`, as many micro-batches of each."""
    # torch's own layers, with as many parameters as Megatron's.
    how: dict[str, Any] = {"dim_feedforward": 4 * HIDDEN, "dropout": 0.0, "activation": "gelu"}
    layers = nn.ModuleList(nn.TransformerEncoderLayer(HIDDEN, HIDDEN // 64, **how) for _ in range(SITES))
    for param in layers.to("cuda", torch.bfloat16).parameters():
        # The float32 gradient that Megatron's DDP would give it.
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
    hidden: Tensor = Ends.apply(hidden_states(TOKENS, HIDDEN))  # type: ignore[no-untyped-call]
    banks = [_Measured([*layers], variants, slots, hidden) for variants, slots in BANKS.values()]
    for index, bank in in_turns(banks, BANK_WARM_UP + BANK_ROUNDS):
        if index == BANK_WARM_UP:
            bank.times.clear()
        bank.run(index)
    return {name: bank.answer() for name, bank in zip(BANKS, banks, strict=True)}


# -- calls that run eager --------------------------------------------------------------------------

# The model under the wrappers does nothing: its forward calls its block, whose forward returns the hidden
# states. A real call scatters by a hundred microseconds, in which what is asked for here would be lost.
IDLE_HIDDEN = 256
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
    documents: int

    def call(self, pack: Pack) -> Tensor:
        """One sample: `CALLS` calls, the device idle before."""
        tokens = pack.tokens.unsqueeze(0).to(self.device)
        hidden = torch.zeros(TOKENS, 1, IDLE_HIDDEN, dtype=torch.bfloat16, device=self.device)
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


def measure_calls() -> Answer:
    """By case the samples `patched` and `unpatched` in us, those of one round at the same places.

    Under whatever wraps the forwards, an idle model does nothing: its block returns its input. What is given
    as positions are the hidden states then.
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

    trainer = made_quickly(_TimedTrainer, model_options(IDLE_HIDDEN, layers=LAYERS, tokens=TOKENS))
    times: Answer = {name: {"patched": [], "unpatched": []} for name in CASES}
    block = mock.patch.object(TransformerBlock, "forward", return_input)
    with block, mock.patch.object(GPTModel, "forward", call_block):
        for _, (name, how) in in_turns([*itertools.product(CASES, ("patched", "unpatched"))], CALL_ROUNDS):
            times[name][how] += trainer.one_round(CASES[name], is_patched=how == "patched")
    return times
