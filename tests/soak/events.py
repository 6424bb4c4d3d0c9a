# SPDX-License-Identifier: Apache-2.0
"""The table of events: what hosts do to models, steps and the plugin. An event is drawn as plain data.
`applies` says whether it can happen to what there is, `do` does the same to both twins, and `reasons` are
those that it explains, from then on."""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import host_rig
import megatron_rig as rig
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from notes import told
from parallel_jobs import SeesOps
from state_changes import CHANGES as OF_PROBES
from torch import distributed
from watched import forget_loss_scale

import megagraph

from .changes import CHANGES, VERIFICATIONS, WRONG, wrong_in_captures
from .models import KINDS, UNIT, draw_plugin

if TYPE_CHECKING:
    from .twins import Twins

Given = dict[str, Any]
Draw = Callable[[Random], Given]
Ranks = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Event:
    do: Callable[..., None]  # to the twins, with what was drawn
    draw: Draw = lambda rng: {}
    applies: Callable[["Twins"], bool] = lambda twins: True
    reasons: frozenset[str] = frozenset()
    weight: int = 2  # how often it comes
    of_ranks: bool = True  # goes with models that ranks share, too


EVENTS: dict[str, Event] = {}
MISFIT = frozenset({"TOO_MANY_SEQUENCES", "TOO_MANY_TOKENS", "SEQUENCE_TOO_LONG"})


def event(*reasons: str, **given: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Puts a function of the twins into the table, under its name in words."""

    def add(do: Callable[..., None]) -> Callable[..., None]:
        EVENTS[do.__name__.replace("_", " ")] = Event(do=do, reasons=frozenset(reasons), **given)
        return do

    return add


def step(*reasons: str, how: Sequence[Any] = (None,), **given: Any) -> Callable[[Any], Any]:
    """The same of a trainer, its micro-batches and one of several ways; what it leaves is compared. If it is
    an event of some ranks, it is told whether it is one of this rank."""
    given = {"draw": lambda rng: {**packs(rng), "how": rng.choice(how)}, **given}

    def add(work: Callable[..., Any]) -> Callable[..., Any]:
        def do(twins: "Twins", packs: list[Given], model: int, **drawn: Any) -> None:
            if "ranks" in drawn:
                drawn["is_ours"] = twins.is_of(drawn.pop("ranks"))
            twins.each(lambda trainer: work(trainer, twins.micros(packs), **drawn), model)

        do.__name__ = work.__name__
        event(*reasons, **given)(do)
        return work

    return add


def packs(rng: Random) -> Given:
    """Packs of a step, at most as large as the rig's capacity; which model takes it, if there are several."""

    def pack() -> Given:
        count = rng.randint(1, rig.CAPACITY.num_seqs)
        rows = [UNIT] * count
        for _ in range(rng.randint(0, rig.CAPACITY.tokens // UNIT - count)):
            rows[rng.randrange(count)] += UNIT
        lengths = [each - rng.randint(0, UNIT - 1) for each in rows]
        given = rng.choice([{"lengths": rows}, {"lengths": lengths}, {"lengths": lengths, "padded": rows}])
        if "padded" in given and rng.random() < 0.2:
            lengths[rng.randrange(count)] = 0
        return {**given, "seed": rng.randrange(1 << 16)}

    return {"packs": [pack() for _ in range(rng.randint(1, 3))], "model": rng.choice([0, 0, 1, 2])}


def of_ranks(rng: Random) -> Given:
    """Which ranks an event is of, where there are several."""
    return {"ranks": rng.choice([[0, 1], [0, 1], [0], [1]])}


def packs_of_ranks(rng: Random) -> Given:
    return {**packs(rng), **of_ranks(rng)}


def one_of(name: str, values: Iterable[str], *, first: Draw = lambda rng: {}, then: Draw = of_ranks) -> Draw:
    """Draws what comes first, one of the values under a name, and what comes then."""
    return lambda rng: {**first(rng), name: rng.choice([*values]), **then(rng)}


def misfits(rng: Random) -> Given:
    """The last one has too many documents, or tokens."""
    given = packs(rng)
    last = {"lengths": rng.choice([[4] * 9, [60, 20]]), "seed": rng.randrange(1 << 16)}
    return {**given, "packs": [*given["packs"], last], "how": None}


def grads(chunk: Any) -> dict[str, torch.Tensor]:
    """Without those that ranks add up where a schedule ends, as each has them of the rows that it had."""
    of_rows = {name for name, it in chunk.named_parameters() if getattr(it, "sequence_parallel", False)}
    return {name: it for name, it in rig.grads(chunk).items() if name not in of_rows}


def run_of(model: Any, plans: bool) -> Any:
    """What Megatron's schedule has a forward step call."""
    return model.build_schedule_plan if plans else model


# -- steps -------------------------------------------------------------------------------------------


@step(weight=16)
def trains(trainer: Any, micros: list[rig.Micro], how: None) -> Any:
    return rig.step(trainer, micros)


@step(*MISFIT, draw=misfits)
def trains_on_packs_that_do_not_fit(trainer: Any, micros: list[rig.Micro], how: None) -> Any:
    return rig.step(trainer, micros)


@step("STATE_CHANGED", weight=4)
def evaluates(trainer: Any, micros: list[rig.Micro], how: None) -> Any:
    return rig.evaluate(trainer, micros)


# Not of late gradients: those that nobody asks for are added to the next. Schedules alone hand stages rows.
_WITHOUT_SCHEDULE = {"applies": lambda twins: not (twins.has("late gradients") or twins.has("stages"))}
_SHARED = {"applies": lambda twins: twins.is_shared}


@step("NO_FREE_SLOT", "NESTING", how=("first", "last", "never"), **_WITHOUT_SCHEDULE)
def calls_without_a_schedule(trainer: Any, micros: list[rig.Micro], how: str) -> Any:
    """All forwards, then the backwards in some order."""
    has_scale = MoEAuxLossAutoScaler.main_loss_backward_scale is not None  # of a schedule, whose it stays
    trainer.zero_grad()
    left = [rig.forward(trainer.model, it, trainer.device)[0] for it in micros]
    for losses in {"first": left, "last": left[::-1], "never": []}[how]:
        losses.sum().backward()
    if not has_scale:
        forget_loss_scale()
    return [losses.detach().clone() for losses in left], grads(trainer.chunk)


@step("STATE_CHANGED")
def trains_in_evaluation_mode(trainer: Any, micros: list[rig.Micro], how: None) -> Any:
    with told(trainer.model.train, False, True):
        return rig.step(trainer, micros)


@step(of_ranks=False)
def trains_in_a_thread(trainer: Any, micros: list[rig.Micro], how: None) -> Any:
    is_eager = megagraph.is_cuda_graph_skipped()  # on this thread alone
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(rig.step, trainer, micros, eager=is_eager).result()


class Broken(Exception):
    """Raised in the middle of a step."""


_BROKEN = itertools.count()


def _raise(*_args: Any, **_kwargs: Any) -> None:
    raise Broken


@step(
    "STATE_CHANGED",
    how=("data", "embedding", "layer", "forward", "loss", "backward"),
    # The last ones of "some" are not the same, and what is broken off asks for no late gradients.
    applies=lambda twins: twins.layout != "some" and not twins.has("late gradients"),
    weight=4,
)
def breaks_off(trainer: Any, micros: list[rig.Micro], how: str) -> Any:
    """In its last micro-batch. What it has added to gradients is compared."""
    chunk = trainer.chunk
    module = {"embedding": getattr(chunk, "embedding", None), "layer": chunk.decoder.layers[-1]}.get(how)
    # No capture runs it: a state that has not been before.
    broken = {"_call_impl": _raise, "broken": next(_BROKEN)}

    def forward_step(data: Iterator[rig.Micro], model: Any, return_schedule_plan: bool = False) -> Any:
        micro = next(data)
        is_last = micro is micros[-1]
        if is_last and how == "data":
            raise Broken
        if is_last and module is not None:
            vars(module).update(broken)
        out, reduce = rig.forward(run_of(model, return_schedule_plan), micro, trainer.device)
        if is_last and how == "forward":
            raise Broken

        def breaks_backward(losses: torch.Tensor) -> Any:
            losses.register_hook(_raise)
            return reduce(losses)

        return out, {"backward": breaks_backward, "loss": _raise}.get(how, reduce) if is_last else reduce

    trainer.zero_grad()
    with contextlib.suppress(Broken):
        rig.run_schedule(trainer.model, forward_step, micros, len(micros))
    if module is not None:
        for name in broken:
            del vars(module)[name]
    return grads(chunk)


@step(how=range(3), weight=4, of_ranks=False)
def asks_a_reference(trainer: Any, micros: list[rig.Micro], how: int) -> Any:
    """A frozen model in a wrapper, which takes another one's place if its seed is another one."""
    known, holder = getattr(trainer, "reference", (how, None))
    if holder is None:
        holder = host_rig.Holder(host_rig.frozen_model(how)[1])
    elif known != how:
        holder.module = host_rig.frozen_model(how)[1]
    trainer.reference = how, holder
    return host_rig.log_probs(holder, micros)


# -- contexts of a step ------------------------------------------------------------------------------


def _suspended() -> AbstractContextManager[None]:
    return told(lambda is_on: megagraph.suspend() if is_on else megagraph.resume(), True, False)


_default_dtype = partial(told, torch.set_default_dtype, torch.float64, torch.float32)


def _autocast() -> AbstractContextManager[Any]:
    if distributed.get_world_size() > 1:  # Megatron's collectives do not take what comes of it
        return nullcontext()
    return torch.autocast("cuda" if rig.ON_GPU else "cpu", torch.bfloat16)


@contextlib.contextmanager
def _side_stream() -> Iterator[None]:
    if not rig.ON_GPU:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


AROUND: dict[str, tuple[Callable[[], AbstractContextManager[Any]], tuple[str, ...]]] = {
    "skipped": (megagraph.disable_cuda_graphs_this_step, ("DISABLED",)),
    "suspended": (_suspended, ("SUSPENDED",)),
    "a watch of all ops": (SeesOps, ("SIGNATURE_CHANGED",)),
    "tensors saved on the host": (torch.autograd.graph.save_on_cpu, ("RECOMPUTING",)),
    "another default dtype": (_default_dtype, ("NUMERICS_CHANGED",)),
    "one thread of autograd": (lambda: torch.autograd.set_multithreading_enabled(False), ()),
    "a search for anomalies": (lambda: torch.autograd.detect_anomaly(check_nan=False), ("NUMERICS_CHANGED",)),
    "autocast": (_autocast, ("NUMERICS_CHANGED",)),
    "another stream": (_side_stream, ()),
}

AROUND_REASONS = {why for _, whys in AROUND.values() for why in whys}


@step("GROUP_DISAGREED", *AROUND_REASONS, draw=one_of("how", AROUND, first=packs), weight=8)
def trains_inside(trainer: Any, micros: list[rig.Micro], how: str, is_ours: bool) -> Any:
    with AROUND[how][0]() if is_ours else nullcontext():
        return rig.step(trainer, micros)


@step("SIGNATURE_CHANGED", "STATE_CHANGED", "GROUP_DISAGREED", draw=packs_of_ranks, **_WITHOUT_SCHEDULE)
def passes_without_gradients(trainer: Any, micros: list[rig.Micro], is_ours: bool) -> Any:
    """Outside of any schedule, in training mode; these ranks so that nobody can ever record any."""
    with torch.inference_mode() if is_ours else torch.no_grad():
        return [rig.forward(trainer.model, it, trainer.device)[0].clone() for it in micros]


@step("PARAMETERS_CHANGED", "GROUP_DISAGREED", draw=packs_of_ranks)
def trains_beside_a_gradient(trainer: Any, micros: list[rig.Micro], is_ours: bool) -> Any:
    """A `.grad` that somebody has left beside `main_grad`: eager adds it to the next one."""
    trainer.zero_grad()
    params = [it for it in trainer.chunk.decoder.layers[0].parameters() if it.requires_grad]
    for param in params[:1] if is_ours else ():
        param.grad = torch.full_like(param, 0.25)
    left = rig.step(trainer, micros, update=False, adds=True)
    trainer.zero_grad()
    return left


@step("STATE_CHANGED", "SIGNATURE_CHANGED", draw=packs_of_ranks, **_SHARED)
def breaks_off_an_evaluation(trainer: Any, micros: list[rig.Micro], is_ours: bool) -> Any:
    """Where nothing is left to do that ranks do together."""
    found: list[torch.Tensor] = []

    def forward_step(data: Iterator[rig.Micro], chunk: Any) -> Any:
        micro = next(data)
        losses, reduce = rig.forward(chunk, micro, trainer.device)
        found.append(losses.detach().clone())
        return losses, _raise if micro is micros[-1] and is_ours else reduce

    with contextlib.suppress(Broken), rig.evaluating(trainer.model):
        rig.run_schedule(trainer.model, forward_step, micros, len(micros), forward_only=True)
    return found


# -- what lasts --------------------------------------------------------------------------------------

# Weights that are parametrized cannot be taken back, or as plain tensors if frozen; tied ones train apart.
LASTING = [name for name in OF_PROBES if name not in ("parametrized weight", "tied weights")]
WATCHED = ("STATE_CHANGED", "PARAMETERS_CHANGED", "FOREIGN_HOOK", "ADDRESS_MOVED", "GROUP_DISAGREED")


@event(*WATCHED, draw=one_of("name", CHANGES), weight=8)
def changes(twins: "Twins", name: str, ranks: Ranks) -> None:
    if name in ("frozen embedding", "frozen layer") and twins.may_overlap:
        return  # stages may have no embedding, plans go back through all, late gradients are of what trains
    is_apart = name == "frozen embedding" and twins.is_shared  # unless each rank trains the layers behind it
    if not (is_apart and twins.anywhere(twins.has_frozen("decoder.layers.0"))):
        twins.change(name, CHANGES[name], twins.ranks_of(name, ranks))


@event(*WATCHED, draw=one_of("name", LASTING), applies=lambda twins: twins.has("probes"), weight=10)
def changes_a_probe(twins: "Twins", name: str, ranks: Ranks) -> None:
    twins.change(name, OF_PROBES[name].do, ranks)


@event(*WATCHED, draw=one_of("how", WRONG), weight=8, **_SHARED)
def is_wrong_in_captures(twins: "Twins", how: str, ranks: Ranks) -> None:
    if how == "raises" or twins.verifies:
        twins.is_wrong |= how != "raises"
        twins.explain("CAPTURE_FAILED", "VERIFY_FAILED", "GROUP_DISAGREED", "SCOPE_UNSUPPORTED", lasts=True)
        twins.change("forward", lambda trainer: wrong_in_captures(trainer, how), ranks)
        for _ in range(3):  # an eager one, a capture, and what is replayed then
            twins.each(lambda trainer: rig.step(trainer, twins.micros([{"lengths": [9, 20]}])))


def _again(rng: Random) -> Given:
    return {"seed": rng.choice([0, 3]), **of_ranks(rng)}  # one of both ranks, or one each, of which one fits


def _captures_again(twins: "Twins", ranks: Ranks, seed: int, around: Any = nullcontext) -> None:
    """In a state that is new, with something around the steps of these ranks."""
    for trainer in twins.pairs[0].both:
        last = trainer.chunk.decoder.layers[-1]
        last.number = getattr(last, "number", 0) + 1  # the address of an object() may be a former one's
    with around() if twins.is_of(ranks) else nullcontext():
        for _ in range(3):
            twins.each(lambda trainer: rig.step(trainer, twins.micros([{"lengths": [9, 20], "seed": seed}])))


@event(*WATCHED, draw=one_of("how", VERIFICATIONS, then=_again), weight=6, **_SHARED)
def verifies(twins: "Twins", how: str, seed: int, ranks: Ranks) -> None:
    twins.explain("VERIFY_FAILED", "GROUP_DISAGREED", "SCOPE_UNSUPPORTED", lasts=how != "fails")
    _captures_again(twins, ranks, seed, VERIFICATIONS[how])


@event(*WATCHED, draw=_again, weight=6, **_SHARED)
def keeps_an_output_while_captures_are_due(twins: "Twins", seed: int, ranks: Ranks) -> None:
    """Of the last layer, whose slot nobody needs before."""
    held: list[Any] = []

    def keep(trainer: Any) -> Any:
        modules = dict(trainer.chunk.decoder.named_children())
        norm = modules.get("final_layernorm", modules.get("final_norm"))
        with norm.register_forward_pre_hook(lambda _norm, args: held.append(args[0].detach())):
            return rig.step(trainer, twins.micros([{"lengths": [9, 20]}]))

    twins.each(keep)
    del held[: -1 if twins.is_of(ranks) else None]
    _captures_again(twins, ranks, seed)
    held.clear()
    twins.each(lambda trainer: rig.step(trainer, twins.micros([{"lengths": [9, 20]}])))


# What is noticed at each call.
LATER = ("class", "frozen", "watched", "hook on", "hook after")
AT_EACH_CALL = [name for name in CHANGES if not name.startswith(LATER)]


@event(
    *(*WATCHED, *AROUND_REASONS, "SCOPE_UNSUPPORTED"),
    draw=lambda rng: {**packs(rng), "name": rng.choice([*AT_EACH_CALL, *AROUND]), **of_ranks(rng)},
    weight=6,
)
def changes_within_a_step(twins: "Twins", packs: list[Given], model: int, name: str, ranks: Ranks) -> None:
    """Before its last micro-batch, and back behind the step. One rank alone may find it, and say so."""
    ranks = twins.ranks_of(name, ranks, inside=True)
    if twins.may_overlap and "NUMERICS_CHANGED" in AROUND.get(name, ("", ()))[1]:
        return  # an error by name: the micro-batch before is still to go backward

    def work(trainer: Any) -> Any:
        micros = twins.micros(packs)

        def forward_step(data: Iterator[rig.Micro], chunk: Any, return_schedule_plan: bool = False) -> Any:
            micro = next(data)
            if micro is micros[-1] and twins.is_of(ranks):
                if name in AROUND:
                    afterwards.enter_context(AROUND[name][0]())
                else:
                    afterwards.callback(CHANGES[name](trainer))
            return rig.forward(run_of(chunk, return_schedule_plan), micro, trainer.device)

        trainer.zero_grad()
        with contextlib.ExitStack() as afterwards:
            left = rig.run_schedule(trainer.model, forward_step, micros, len(micros))
        return left, rig.grads(trainer.chunk)

    twins.each(work, model, is_alone=twins.may_be_alone(ranks))


@event(applies=lambda twins: bool(twins.undos), weight=6)
def takes_back(twins: "Twins") -> None:
    twins.take_back()


@event("NUMERICS_CHANGED", "GROUP_DISAGREED", draw=one_of("precision", ("highest", "high")))
def sets_a_precision(twins: "Twins", precision: str, ranks: Ranks) -> None:
    if twins.is_of(ranks):
        torch.set_float32_matmul_precision(precision)


@event("SUSPENDED", "GROUP_DISAGREED", draw=of_ranks)
def suspends(twins: "Twins", ranks: Ranks) -> None:
    if twins.is_of(ranks):
        megagraph.suspend()


@event("GROUP_DISAGREED", draw=of_ranks, weight=4)
def resumes(twins: "Twins", ranks: Ranks) -> None:
    if twins.is_of(ranks):
        megagraph.resume()


# The second reason is of halves without adapters, which are frozen.
@event("ADDRESS_MOVED", "STATE_CHANGED", applies=lambda twins: twins.may_adapt, of_ranks=False)
def adapts(twins: "Twins") -> None:
    """DDP does not know these adapters, and nobody takes them out again."""
    twins.may_adapt = False
    for trainer in twins.pairs[0].both:
        host_rig.adapt(trainer.chunk)


# -- memory ------------------------------------------------------------------------------------------


@event("NO_FREE_SLOT", draw=packs, of_ranks=False)
def keeps_an_output(twins: "Twins", packs: list[Given], model: int) -> None:
    """Of the decoder, until somebody lets go."""

    def work(trainer: Any) -> Any:
        with trainer.chunk.decoder.register_forward_hook(lambda _it, _args, out: twins.held.append(out)):
            return rig.step(trainer, twins.micros(packs))

    twins.each(work, model)


@event(weight=4)
def lets_go(twins: "Twins") -> None:
    twins.held.clear()
    gc.collect()


MOVES = ("ADDRESS_MOVED", "GROUP_DISAGREED")


def _announced(rng: Random) -> Given:
    return {"is_told": rng.random() < 0.5, "index": rng.randrange(64), **of_ranks(rng)}


@event(*MOVES, draw=_announced)
def moves_gradients(twins: "Twins", is_told: bool, index: int, ranks: Ranks) -> None:
    with _suspended() if is_told else nullcontext():
        for trainer in twins.first_of(ranks):
            twins.kept.append(host_rig.Offload())
            twins.kept[-1].move_gradients(trainer.model)


@event(*MOVES, draw=_announced, weight=4)
def moves_a_weight(twins: "Twins", is_told: bool, index: int, ranks: Ranks) -> None:
    with _suspended() if is_told else nullcontext():
        for trainer in twins.first_of(ranks):
            params = [*trainer.chunk.decoder.parameters()]
            param = params[index % len(params)]
            twins.kept.append(param.data)
            param.data = param.data.clone()
            twins.kept[-1].fill_(float("nan"))


@event(*MOVES, draw=_announced)
def offloads(twins: "Twins", is_told: bool, index: int, ranks: Ranks) -> None:
    if twins.anywhere(twins.is_of(ranks) and twins.has_frozen("")):
        twins.explain("FOREIGN_HOOK", "GROUP_DISAGREED", lasts=True)  # once they train again: DDP's are lost
        ranks = twins.ranks_of("frozen layer", ranks)
    with _suspended() if is_told else nullcontext():
        for trainer in twins.first_of(ranks):
            offload = host_rig.Offload()
            offload.weights(trainer.chunk)
            offload.gradients(trainer.model)
            offload.weights_back(trainer.chunk, trainer.device)
            offload.gradients_back(trainer.model)
            twins.kept.append(offload)


@event()
def reloads(twins: "Twins") -> None:
    for trainer in twins.pairs[0].both:
        weights = {name: it.clone() for name, it in trainer.chunk.state_dict().items() if it is not None}
        trainer.chunk.load_state_dict(weights, strict=False)  # without what modules keep beside tensors


# -- models and the plugin ---------------------------------------------------------------------------


@event(
    draw=one_of("kind", KINDS, then=lambda _: {}),
    applies=lambda twins: len(twins.pairs) < 3 and not twins.has("stages"),
    of_ranks=False,
)
def adds_a_model(twins: "Twins", kind: str) -> None:
    """One that has what the scopes name. Megatron counts the experts of one model alone."""
    added = KINDS[kind]
    is_counted = twins.has("experts") and "experts" in added.has
    if twins.scopes in added.scopes and added.around is nullcontext and not is_counted:
        twins.add(kind)


@event(applies=lambda twins: len(twins.pairs) > 1)
def drops_a_model(twins: "Twins") -> None:
    twins.drop()


@event(draw=lambda rng: {"plugin": draw_plugin(rng)}, weight=1)
def installs_anew(twins: "Twins", plugin: Given) -> None:
    twins.install({**plugin, **{it: twins.plugin[it] for it in ("capacities", "verify") if twins.is_wrong}})
