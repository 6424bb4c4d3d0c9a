# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario on pairs of models of the same weights, of which one runs eager and one has graphs."""

import contextlib
import gc
import re
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import megatron_rig as rig
import moe_rig
import overlap_rig
import torch
from context_jobs import OwnMicro, SharedMicro
from same_bits import BitsDiffer, assert_same_bits
from state_changes import Do, of_all
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves
from watched import free_models, go_in_time, models_in_memory

import megagraph
from megagraph.demo.trainer import Trainer

from .changes import OF_FORWARDS
from .events import EVENTS, MISFIT
from .models import KINDS, LAYOUTS, SHARES_PACKS, UNIT, Kind, plugin_of
from .scenarios import Scenario

PLUGIN = Path(megagraph.__file__).parent
CALM_STEPS = 10  # in which graphs have to come back, once all is as it was; eight if they went three times
CALM = [{"lengths": [9, 20]}, {"lengths": [3, 30, 8], "seed": 1}]
GIVEN_UP = re.compile(r"^\w+Error: |gave this up$")  # a capture
TOO_MANY = {"lengths": [4] * 9, "padded": [4] * 9}
# What all ranks say before a step, where one of them has changed inside of the last one.
WERE_APART = "inside a step the layers' state changed on some of the ranks"
# Reasons for which layers have no graph.
OF_LAYERS = {"FOREIGN_HOOK", "SHARED_PARAMETER", "SCOPE_UNSUPPORTED", "CAPTURE_FAILED", "SIGNATURE_CHANGED"}
OF_LAYERS |= {"VERIFY_FAILED", "GROUP_DISAGREED"}


class EagerRaises(Exception):
    """The eager twin raises, so that the scenario is none."""


class AsGiven(Exception):
    """No layer has a graph, so that packs run as they were given: some kernels round otherwise then. Experts
    that are padded to a capacity drop other tokens: it goes by the rows."""


class Unverified(Exception):
    """Graphs that are wrong on purpose were used, and the report says that nothing verified them."""


ENDS = {it.__name__ for it in (EagerRaises, AsGiven, Unverified)}  # of scenarios that have not failed


class WrongFigures(AssertionError):
    """Calls were counted under a reason that nothing explains, or graphs did not come back."""


class RanksApart(AssertionError):
    """Of ranks that run the same packs one has run eager what another has replayed, and has not asked it."""


class Leak(AssertionError):
    """Models, graphs or banks stay in memory."""


@dataclass(kw_only=True)
class Outcome:
    done: Counter[str] = field(default_factory=Counter)  # events, by name
    calls: int = 0
    replays: int = 0
    failure: str | None = None  # what kind
    text: str = ""  # all about it
    at: int = -1  # the event

    @property
    def has_failed(self) -> bool:
        return self.failure not in (None, *ENDS)


def _raise_for_host(error: Exception) -> NoReturn:
    """Ends a scenario that is none, unless it is the plugin's own code that has raised."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    if raised_in.is_relative_to(PLUGIN) and not raised_in.is_relative_to(PLUGIN / "demo"):
        raise error
    raise EagerRaises(repr(error)) from error


def _are_near(one: Any, other: Any) -> bool:
    """Whether both are the same but for roundings. Those of half precision are of a 256th, and add up."""
    both = [[vars(it) if isinstance(it, rig.Step) else it for it in found] for found in (one, other)]
    leaves, others = map(tree_leaves, both)
    return len(leaves) == len(others) and all(map(_is_near, leaves, others))


def _is_near(one: Any, other: Any) -> bool:
    """Of tensors as a whole: entries that nearly cancel out are mostly rounding."""
    if not isinstance(one, Tensor | float) or not isinstance(other, Tensor | float):
        return bool(one == other)
    values, apart = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    return values.shape == apart.shape and bool((values - apart).norm() <= values.norm() / 64)


class Twins:
    """Pairs of models, and all that has been done to them and will have to be taken back."""

    # What this rank had to run eager inside of a step, since ranks were compared.
    asked: ClassVar[list[list[int]]] = []

    def __init__(self, scenario: Scenario) -> None:
        self._kind, self.scopes, self.layout = KINDS[scenario.kind], scenario.scopes, scenario.layout
        self.is_shared, self.rank = bool(scenario.layout), distributed.get_rank()
        self.pairs: list[rig.Pair] = []
        self._kinds: list[Kind] = []
        # What takes the changes of the first pair back, last one first, and which ranks these are of.
        self.undos: list[tuple[Sequence[int], Callable[[], None]]] = []
        self.held: list[Any] = []  # memory that somebody keeps for a while
        self.kept: list[Any] = []  # memory that takes the place of what was freed
        self.may_adapt = self.has("dense")
        # Whether micro-batches go forward between the forward and the backward of another one.
        self.may_overlap = self.has("overlap") or self.has("stages")
        self.is_wrong = False  # in captures, which verifications find
        self.expected: set[str] = {"WARMING_UP"}  # reasons that something has explained
        self.scars: set[str] = set()  # of these those that stay
        self.reports: dict[str, dict[str, Any]] = {}  # by model
        self._seed = 0
        self._is_alone = False  # one rank may have found something inside of the last step
        self.asked.clear()
        self._group = megagraph.context_groups((1, 2)).of_size(2) if self.layout == "some" else None
        self.install(scenario.plugin)
        self.add(scenario.kind)
        if self.is_shared and scenario.plugin["capacities"]:
            steps = scenario.plugin["cuda_graph_warmup_steps"]  # of which there has been one
            for _ in range(steps):
                self.each(lambda trainer: rig.step(trainer, self.micros(CALM)))
            report = self._report_of(self.pairs[0].graphed)
            if report["eager"]["WARMING_UP"] * (steps + 1) != report["calls"] * steps:
                raise WrongFigures(f"expected graphs after {steps} steps, got {report}")

    def install(self, plugin: dict[str, Any]) -> None:
        self.held.clear()
        megagraph.uninstall()
        megagraph.install(plugin_of(self._kind, self.scopes, plugin, self.layout))
        self.plugin = plugin
        if self.pairs:  # whose DDP is a stranger until a schedule shows it
            self.explain("FOREIGN_HOOK")
        # Each capacity that a pack takes has been verified, in rows of each rank.
        has_one = len(plugin["capacities"]) == 1 and self.layout not in ("some", "sp")
        self.verifies = plugin["verify"] != "off" and has_one
        self.fits_all = any(longest == rig.CAPACITY.tokens for *_, longest in plugin["capacities"])
        self.scars -= MISFIT
        if not self.fits_all:
            self.explain(*MISFIT, lasts=True)
        if self.layout == "sp":  # whose buffer of gathered rows grows with a larger pack, and moves
            self.explain("ADDRESS_MOVED")
        if self.layout == "some":  # outside of schedules others may call it less often
            self.explain("GROUP_DISAGREED", *MISFIT)

    def add(self, name: str) -> None:
        kind = KINDS[name]
        self._kinds.append(kind)
        config = {"config": LAYOUTS[self.layout]} if self.layout else {}
        self.pairs.append(rig.Pair(kind.make, **config))
        self.explain(*kind.reasons, lasts=True)
        self.each(lambda trainer: rig.step(trainer, self.micros(CALM)), len(self.pairs) - 1)

    def drop(self) -> None:
        """The last pair, which nobody uses any more and nobody keeps, but for Megatron's dispatchers."""
        self.held.clear()
        gone = [weakref.ref(trainer.chunk) for trainer in self.pairs.pop().both]
        gc.collect()
        may_stay = "experts" in self._kinds.pop().has
        if not (may_stay or go_in_time(lambda: all(it() is None for it in gone))):
            raise Leak("a model that was dropped stays")

    def explain(self, *reasons: str, lasts: bool = False) -> None:
        """From now on there may be calls for these; for ever, if nobody takes back what makes them."""
        self.expected |= {*reasons}
        if lasts:
            self.scars |= {*reasons}

    def micros(self, packs: Sequence[dict[str, Any]]) -> list[rig.Micro]:
        """Of what was drawn, those that this rank runs. A plan runs them as given: they fill the capacity."""
        found = []
        if self.layout in ("dp", "ep") and self.rank:
            packs = [{**it, "seed": it.get("seed", 0) + 1} for it in packs[::-1]]
        elif self.layout == "some":  # every second pack is shared; others are each rank's own, if they fit
            seeds = [it.get("seed", 0) for it in packs]
            groups = [{"group": None if seed % 2 else self._group} for seed in seeds]
            other = [TOO_MANY if self.rank and seed % 4 == 3 else {} for seed in seeds]
            packs = [it | many | group for it, many, group in zip(packs, other, groups, strict=True)]
        micro = {"cp": SharedMicro, "some": OwnMicro}.get(self.layout, rig.Micro)
        for it in packs:
            fields = {name: tuple(value) if isinstance(value, list) else value for name, value in it.items()}
            if self.layout and "padded" not in it:
                fields["padded"] = tuple(-(-length // UNIT) * UNIT for length in it["lengths"])
            found.append(micro(**fields))
        return [*map(overlap_rig.filled, found)] if self.has("overlap") else found

    def has(self, *features: str) -> bool:
        """Whether the first pair has all of them."""
        return {*features} <= self._kind.has

    def is_of(self, ranks: Sequence[int]) -> bool:
        """Whether an event of some ranks is one of this rank."""
        return not self.is_shared or self.rank in ranks

    def anywhere(self, is_so: bool) -> bool:
        """Whether it is so of any rank, each of which asks."""
        if not self.is_shared:
            return is_so
        number = torch.tensor([is_so], dtype=torch.int32, device=self.pairs[0].eager.device)
        distributed.all_reduce(number, op=distributed.ReduceOp.MAX)
        return bool(number.item())

    def has_frozen(self, name: str) -> bool:
        """Whether something in a module of the first pair, or in all of it, does not train on this rank."""
        params = self.pairs[0].eager.chunk.get_submodule(name).parameters()
        return not all(param.requires_grad for param in params)

    def ranks_of(self, name: str, ranks: Sequence[int], *, inside: bool = False) -> Sequence[int]:
        """The ranks that a change may be of, where these were drawn; `inside` of a step or between two.
        Without gradients of its input a layer has fewer collectives, and none if it is frozen. With sequence
        parallelism which rows a rank has goes by the padding, and what one rank alone computes otherwise does
        so of other rows. So it does inside of a step where the others have no graphs left and run packs as
        given: it asks them then, and here nobody answers."""
        of_rows = ("frozen layer", "hook on a gradient", *OF_FORWARDS)
        is_of_all = name == "frozen embedding" or (self.layout == "sp" and name in of_rows)
        is_of_all |= name == "frozen layer" and self.has_frozen("embedding")
        is_of_all |= inside and bool(self.expected & {"CAPTURE_FAILED", "VERIFY_FAILED"})
        return [0, 1] if is_of_all else ranks

    def first_of(self, ranks: Sequence[int]) -> Sequence[Trainer]:
        """Both of the first pair, on these ranks."""
        return self.pairs[0].both if self.is_of(ranks) else ()

    def each(self, work: Callable[[Trainer], Any], model: int = 0, *, is_alone: bool = False) -> None:
        """The same work on both leaves the same. `is_alone`: something happens to one rank inside of it."""
        was_alone, self._is_alone = self._is_alone, is_alone
        pair = self.pairs[model if model < len(self.pairs) else 0]
        self._seed += 1

        def work_of(trainer: Trainer) -> Any:
            torch.manual_seed(self._seed)
            return work(trainer), rig.metrics()

        of_eager = self._report_of(pair.eager)
        with megagraph.disable_cuda_graphs_this_step():
            try:
                one = work_of(pair.eager)
            except Exception as error:
                _raise_for_host(error)
        before, is_renewed = self._report_of(pair.graphed), False
        try:
            other = work_of(pair.graphed)
        except RuntimeError as error:
            if not was_alone or WERE_APART not in str(error):
                raise
            self.install(self.plugin)
            before, is_renewed = self._report_of(pair.graphed), True
            other = work_of(pair.graphed)
        try:
            assert_same_bits(one, other)
        except BitsDiffer as error:
            after = self._report_of(pair.graphed)
            if self.is_wrong and after["verification"]["unverified"]:
                raise Unverified(str(after["verification"]["unverified_sites"])) from error
            whys = rig.eager_since(after, before).keys() & OF_LAYERS
            drops = "moe_pad_expert_input_to_capacity"
            is_known = getattr(pair.eager.chunk.config, drops, False) or _are_near(one, other)
            # The eager twin has run so by the former plugin's reasons, or since no step of it has ended yet.
            is_new = is_renewed or "WARMING_UP" in rig.eager_since(self._report_of(pair.eager), of_eager)
            if (whys or is_new) and after["replays"] == before["replays"] and is_known:
                raise AsGiven(f"for {whys or 'reasons of a new plugin'}") from error
            raise

    def change(self, name: str, do: Do, ranks: Sequence[int]) -> None:
        """Changes both of the first pair until it is taken back; once, if it is of all models."""
        if name in OF_FORWARDS and self.scopes:  # a layer whose halves cannot be told apart stays eager
            self.explain("SCOPE_UNSUPPORTED", lasts=True)
        try:
            self.undos.append((ranks, of_all(do, self.first_of(ranks))))
        except Exception as error:  # such as hooks on parameters that are frozen
            _raise_for_host(error)

    def take_back(self) -> None:
        self.undos.pop()[1]()

    def may_be_alone(self, ranks: Sequence[int]) -> bool:
        """Whether an event of these ranks may be none on one of them: where they are as another one was."""
        return any(len(it) == 1 for it in (ranks, *(of for of, _ in self.undos)))

    def account(self) -> None:
        """Whether all calls are counted, under reasons that something explains."""
        for pair in self.pairs:
            for trainer in pair.both:
                report = self._report_of(trainer)
                if report["calls"] != report["replays"] + sum(report["eager"].values()):
                    raise WrongFigures(f"calls that nobody counts: {report}")
                if any(map(GIVEN_UP.search, report["failures"])):
                    raise WrongFigures(f"a whole capture was given up: {report}")
                if trainer is pair.eager and report["replays"]:
                    raise WrongFigures(f"the eager model has replayed: {report}")
                if trainer is pair.graphed and report["calls"]:
                    self.reports[report["model"]] = report
                    if unexplained := report["eager"].keys() - self.expected:
                        raise WrongFigures(f"unexplained: {unexplained} in {report}")
        if self.layout in SHARES_PACKS:
            self._compare_ranks()

    def _compare_ranks(self) -> None:
        """Of packs that they share: whether one has replayed more, which another has asked it for. That would
        be an error by name, and the end of the job: another one begins."""
        report = self._report_of(self.pairs[0].graphed)
        shared = report["cp_sizes"].get("2", {}) if self.layout == "some" else {"replayed": report["replays"]}
        replays, said = shared.get("replayed", 0), [None, None]
        distributed.all_gather_object(said, (replays, report["graphs"], self.asked))
        self.asked.clear()
        (one, graphs, asked), (other, others, others_asked) = said
        are_apart, is_named = one != other, asked != others_asked
        is_false_alarm = not are_apart and bool(asked) != bool(others_asked)
        if graphs != others or are_apart > is_named or is_named > self._is_alone or is_false_alarm:
            raise RanksApart(f"replays, graphs and what was asked for on each rank: {said}")
        if is_named:
            self.install(self.plugin)

    def _report_of(self, trainer: Any) -> dict[str, Any]:
        for graphs in rig.the_plugin().all_graphs():
            if graphs.model() is trainer.chunk:
                return graphs.report()
        # It has not run since the plugin was installed.
        none = {"calls": 0, "replays": 0, "graphs": 0, "eager": {}, "cp_sizes": {}, "failures": []}
        return {**none, "verification": {"unverified": 0}}

    def calm_down(self) -> None:
        """Takes everything back; from then on the first pair replays again."""
        self.held.clear()
        gc.collect()
        megagraph.resume()
        torch.set_float32_matmul_precision("highest")
        while self.undos:
            self.take_back()
        left: set[str] = set()
        for _ in range(CALM_STEPS):
            before = self._report_of(self.pairs[0].graphed)
            self.each(lambda trainer: rig.step(trainer, self.micros(CALM)))
            after = self._report_of(self.pairs[0].graphed)
            left = rig.eager_since(after, before).keys() - self.scars
            if not left and not self.layout:  # ranks do as many
                break
        if left or (after["replays"] == before["replays"] and self.fits_all and not self.scars):
            raise WrongFigures(f"no graphs after {CALM_STEPS} calm steps, for {left}: {after}")
        self.each(lambda trainer: rig.weights(trainer.chunk))


def run(scenario: Scenario) -> Outcome:
    """Runs it to its end or its first failure."""
    outcome, kind = Outcome(), KINDS[scenario.kind]
    precision = torch.get_float32_matmul_precision()
    rig.forget_metrics()
    with moe_rig.experts_on_cpu():
        try:
            with contextlib.nullcontext() if scenario.layout else kind.around():
                _run(scenario, outcome)
        except Exception as error:
            outcome.failure, outcome.text = type(error).__name__, traceback.format_exc()
        finally:  # what is of the whole process is as it was
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(True)
            megagraph.resume()
            megagraph.uninstall()
            rig.forget_metrics()
    free_models()
    stay = models_in_memory()
    if stay and outcome.failure is None:
        outcome.failure, outcome.text, outcome.at = Leak.__name__, "\n".join(stay), len(scenario.events)
    return outcome


def _run(scenario: Scenario, outcome: Outcome) -> None:
    twins = Twins(scenario)
    try:
        for outcome.at, (name, given) in enumerate(scenario.events):
            event = EVENTS[name]
            if event.applies(twins):
                outcome.done[name] += 1
                alike = {"GROUP_DISAGREED"} if given.get("ranks", [0, 1]) == [0, 1] else set()
                twins.explain(*event.reasons - alike)
                event.do(twins, **given)
                twins.account()
        outcome.at = len(scenario.events)
        twins.calm_down()
        twins.account()
    finally:
        while twins.undos:
            twins.take_back()
        for report in twins.reports.values():
            outcome.calls += report["calls"]
            outcome.replays += report["replays"]
