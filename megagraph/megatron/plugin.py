# SPDX-License-Identifier: Apache-2.0
"""The installed plugin: knows every model that ran, and the steps they run in."""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megagraph import _C
from megagraph._C import StageSchedule
from megagraph.config import GraphConfig
from megagraph.log import about, let_speak
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.parallel.ddp import find_ddp
from megagraph.megatron.parallel.groups import ranks_of
from megagraph.megatron.parallel.model_parallel import schedule_of
from megagraph.report import StepClock

__all__ = ["Plugin", "disable_cuda_graphs_this_step", "is_cuda_graph_skipped", "key_of"]

# What a module is known by while it lives: its address. Since Python 3.12 `id()` raises an audit event, for
# which filelock, among others, has a hook in Python.
key_of: Callable[[object], int] = object.__hash__


@contextlib.contextmanager
def disable_cuda_graphs_this_step() -> Iterator[None]:
    """Runs what is inside eager, on canonical packs: forward, backward and recompute.

    Around whole steps: a backward whose forward replayed is replayed too. Other threads replay.
    """
    outer = _C.set_skipped(True)
    try:
        yield
    finally:
        _C.set_skipped(outer)


def is_cuda_graph_skipped() -> bool:
    """Whether `disable_cuda_graphs_this_step()` is in force on this thread."""
    return _C.is_skipped()


class Plugin:
    """Models and steps."""

    def __init__(self, config: GraphConfig) -> None:
        self.config = config
        # By the key of a model, and of its blocks: of layers, and of multi-token prediction. An entry goes
        # with its module, so before another one can have that key. Weak ones would be made and hashed in
        # each call.
        self._graphs: dict[int, GraphedModel] = {}
        self._of_block: dict[int, GraphedModel] = {}
        # Look graphs up by the key of a model, and of its block. No functions of ours: they run in each call.
        self.known_graphs, self.graphs_of_block = self._graphs.get, self._of_block.get
        self._is_suspended = False
        self._one_at_a_time = threading.RLock()  # two threads may call a model that is new
        self.is_over = False  # released: what still calls a wrapper reaches what that wraps
        self.training_steps, self.clock = 0, StepClock()
        self.leave_report: Callable[[], None] = lambda: None  # called once an interval of the log
        self.stage, self.stages = 0, 1  # of the last pipeline for whose stage this rank speaks
        self.has_pipeline = False  # some model is a stage of one
        self.name_of: Callable[[Any], str | None] = lambda model: None  # see `install(name=...)`
        self._num_named: Counter[str] = Counter()  # models of each name so far
        self.gone: list[GraphedModel] = []  # whose model is gone, still with their graphs
        self._retired: list[tuple[dict[str, Any], list[Any]]] = []  # their reports and leases
        self.step_models: Sequence[nn.Module] = ()  # of the schedule that runs; none if none does
        # That was made last in the step of a micro-batch: patch/overlap.py.
        self.last_pack: weakref.ref[Any] | None = None
        self.step_graphs: set[GraphedModel] = set()  # of the models whose step it is
        # Both of each schedule that runs: those of two threads need not end in turn.
        self._steps: list[tuple[Sequence[nn.Module], set[GraphedModel]]] = []
        self._inside: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self._around: weakref.WeakKeyDictionary[nn.Module, GraphedModel] = weakref.WeakKeyDictionary()
        self._outside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # since a step began
        self._finalizers: list[weakref.finalize[..., nn.Module]] = []

    def graphs_around(self, module: nn.Module) -> GraphedModel | None:
        """The graphs of the model whose layers have a module, if it has run and is not refused; else None."""
        if module not in self._around and module not in self._outside:
            self._outside.add(module)
            for graphs in self.all_graphs():
                model = graphs.model()
                if model is not None and module in model.get_submodule("decoder").modules():
                    self._around[module] = graphs
        found = self._around.get(module)
        return None if found is None or found.refusal is not None else found

    def graphs_of_model(self, model: Any) -> GraphedModel:
        """The graphs of a GPTModel; made at its first forward."""
        with self._one_at_a_time:
            return self._graphs.get(key_of(model)) or self._new_graphs(model)

    def _new_graphs(self, model: Any) -> GraphedModel:
        key = key_of(model)
        ddp, stages = find_ddp(self.step_models, model), schedule_of(model)
        name = self._name(model, stages)
        self.has_pipeline = self.has_pipeline or stages.stages > 1
        # The rank of a stage that is in the pipeline of rank 0 writes its report.
        if stages.stages > 1 and 0 in ranks_of(model.pp_group):
            self.stage, self.stages = stages.stage, stages.stages
            let_speak(True)
        with about(name), torch.inference_mode(False):  # its tensors are written later, in any mode
            graphs = GraphedModel(model, ddp, self.config, name)
        graphs.changes.set_suspended(self._is_suspended)
        self._graphs[key] = graphs
        self._when_gone(model, lambda: self.gone.append(self._graphs.pop(key)))
        for block in (model.decoder, getattr(model, "mtp", None)):
            if block is not None:
                self._of_block[key_of(block)] = graphs
                self._when_gone(block, self._of_block.pop, key_of(block), None)
        self._inside.clear()  # it may have taken another one's place in a wrapper
        self._outside.clear()
        if graphs in self._graphs_inside(self.step_models):
            self.step_graphs.add(graphs)
        return graphs

    def _when_gone(self, module: nn.Module, forget: Callable[..., object], *args: Any) -> None:
        finalizer = weakref.finalize(module, forget, *args)
        finalizer.atexit = False
        self._finalizers = [it for it in self._finalizers if it.alive] + [finalizer]

    def _name(self, model: Any, stages: StageSchedule) -> str:
        """As the user calls it, or its class; its place in a pipeline; a number for further such models."""
        kind = str(self.name_of(model) or type(model).__name__)
        chunk = f", chunk {model.vp_stage or 0}" if stages.chunks > 1 else ""
        kind += f" (stage {stages.stage}{chunk})" if stages.stages > 1 else ""
        self._num_named[kind] += 1
        return kind if self._num_named[kind] == 1 else f"{kind} #{self._num_named[kind]}"

    def retire(self) -> None:
        """Of models that are gone the graphs go and the figures stay.

        Not when they go: garbage is collected in the middle of anything, a capture or a trace.
        """
        self._outside.clear()  # models may have other layers by now
        while self.gone:
            graphs = self.gone.pop(0)
            self._retired.append((graphs.report(), graphs.captures.bank.last_leases()))
            graphs.captures.bank.release()

    def reports(self) -> list[dict[str, Any]]:
        """What every model did so far, also those that are gone. Waits for the device."""
        self.retire()
        return [report for report, _leases in self._retired] + [it.report() for it in self.all_graphs()]

    def leases(self) -> dict[str, list[Any]]:
        """When slots were last leased, by the names of models that have several, gone ones included."""
        self.retire()
        gone = ((report["model"], leases) for report, leases in self._retired)
        living = ((graphs.name, graphs.captures.bank.last_leases()) for graphs in self.all_graphs())
        return {name: leases for name, leases in (*gone, *living) if leases}

    def all_graphs(self) -> list[GraphedModel]:
        """The graphs of every model that is alive."""
        return list(self._graphs.values())

    def _graphs_inside(self, models: Sequence[nn.Module]) -> list[GraphedModel]:
        inside: set[int] = set()
        for model in models:
            if model not in self._inside:
                self._inside[model] = {key_of(module) for module in model.modules()}
            inside |= self._inside[model]
        # Of a copy: garbage may be collected in between, and take entries with it.
        return [graphs for model, graphs in self._graphs.copy().items() if model in inside]

    def schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a schedule: what is due at a step boundary happens before it."""

        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            model = kwargs["model"]
            models = list(model) if isinstance(model, list | tuple) else [model]
            self.retire()
            inside, is_outer = self._graphs_inside(models), not self._steps
            self._steps.append(own := (models, set(inside)))
            self.step_models, self.step_graphs = own
            try:
                for graphs in inside:
                    with about(graphs.name):
                        graphs.look_around(models)
                        graphs.at_step_boundary()
                trains = not kwargs.get("forward_only", False)
                is_measured = inside and is_outer and trains
                may_replay = not _C.is_skipped() and any(graphs.may_replay_training for graphs in inside)
                kind = "graphed" if may_replay else "eager"  # for the most part
                with self.clock.step(kind if is_measured else None), contextlib.ExitStack() as outside:
                    # To hand a backward to autograd's own thread costs as much as autograd's call itself.
                    if may_replay:
                        outside.enter_context(torch.autograd.set_multithreading_enabled(False))
                    result = original(*args, **kwargs)
                ran = self._graphs_inside(models)
                for graphs in ran:
                    graphs.after_step()
                    if graphs.dispatcher.expect(kwargs.get("seq_length") or 0, trains=trains):
                        graphs.captures.reset()
                if trains:
                    for graphs in ran:
                        graphs.after_training_step()
                    self.training_steps += 1
                    interval = self.config.log_interval
                    if interval and self.training_steps % interval == 0:
                        self.leave_report()
                return result
            except BaseException:
                for graphs in inside:
                    graphs.break_step()
                raise
            finally:
                self._steps.remove(own)
                self.step_models, self.step_graphs = self._steps[-1] if self._steps else ((), set())

        return forward_backward

    def before_model(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wraps the making of a model, hybrid or not: it may use the memory of those that are gone."""

        def init(*args: Any, **kwargs: Any) -> None:
            self.retire()
            original(*args, **kwargs)

        return init

    def before_groups_go(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps what destroys process groups: graphs that hold their collectives go first."""

        def destroy(*args: Any, **kwargs: Any) -> Any:
            self.retire()
            group = args[0] if args else kwargs.get("group")  # None is every group
            for graphs in self.all_graphs():
                if graphs.peers.use(group):
                    graphs.peers.leave(group)
                    graphs.captures.reset()
            return original(*args, **kwargs)

        return destroy

    def set_suspended(self, is_suspended: bool) -> None:
        """Runs every model eager as long as it is, also those that are still to come."""
        self.retire()
        self._is_suspended = is_suspended
        for graphs in self.all_graphs():
            graphs.changes.set_suspended(is_suspended)

    def release(self) -> None:
        """Drops every graph of every model, and lets go of them and of all that runs from now on."""
        self.is_over = True
        self.leave_report = lambda: None  # it is whole, and steps of a wrapper that somebody covers go on
        let_speak(False)
        self.retire()
        for graphs in self.all_graphs():
            graphs.captures.bank.release()
        for finalizer in self._finalizers:  # which the models keep alive, and their arguments with them
            finalizer.detach()
        for known in (self._graphs, self._of_block, self._around, self._inside):
            known.clear()
