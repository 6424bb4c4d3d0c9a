# SPDX-License-Identifier: Apache-2.0
"""Finds what overrides the forwards of Megatron's models and blocks, and wraps it too.

A class may override a forward without calling it, and a host may set one on an instance; neither would ever
reach the wrapped original. Which of several forwards acts is found out by `Entry`.

Code around the innermost forward sees rows and packs as they were given. If the plugin cannot act there, the
model is refused by a sentence, and its calls count.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph.megatron.graphs.entry import Entries, Entry, Level
from megagraph.megatron.graphs.micro_batch import MicroBatch
from megagraph.megatron.graphs.model_graphs import ModelGraphs
from megagraph.megatron.patch.forwards import Arguments, ForwardWrappers, decided_as_given, places_of
from megagraph.megatron.plugin import Plugin, key_of
from megagraph.megatron.scopes.walk import LayersOneByOne
from megagraph.megatron.seams import Seam

__all__ = ["Overrides"]

Wrap = Callable[[Level], Callable[..., Any]]
# A module, and the forward that is set on the instance, or None where none is.
_Known = tuple["weakref.ref[nn.Module]", Callable[[], Any] | None]


class Overrides:
    """Every forward by which a call may enter a model, or a block of layers.

    Args:
        plugin: knows the graphs of every model.
        wrappers: of Megatron's own forwards.
    """

    def __init__(self, plugin: Plugin, wrappers: ForwardWrappers) -> None:
        self._plugin = plugin
        self._wrappers = wrappers
        self._of_models: dict[type, tuple[Seam, Level]] = {}
        self._of_blocks: dict[type, tuple[Seam, Level]] = {}
        self._undo: list[Callable[[], None]] = []
        # Of what a schedule was given: the modules inside, each with its instance's forward. The plugin lives
        # as long as the process, and such a forward most often refers to its module.
        self._inside: weakref.WeakKeyDictionary[nn.Module, list[_Known]] = weakref.WeakKeyDictionary()

    def model_seam(self, seam: Seam) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What wraps the forward of a class of models."""
        return self._at_seam(seam, self._of_models, self._wrappers.model_forward)

    def block_seam(self, seam: Seam, wrap: Wrap) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What wraps the forward of a class of blocks, by `wrap`."""
        return self._at_seam(seam, self._of_blocks, wrap)

    def _at_seam(
        self, seam: Seam, owners: dict[type, tuple[Seam, Level]], wrap: Wrap
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            level = Level(where=seam.path, overrides=seam.path, missing=(), held=lambda: original)
            owners[seam.owner()] = seam, level
            return _marked(wrap(level), level)

        return wrapper

    def wrap_known_classes(self) -> None:
        """Wraps what overrides forwards in classes that exist by now; later ones are found where they run."""
        for owners, wrap in (
            (self._of_models, self._overriding_model),
            (self._of_blocks, self._overriding_block),
        ):
            for owner, (seam, _level) in owners.items():
                classes = [owner]
                for cls in classes:
                    classes += cls.__subclasses__()
                for _level in self._of_classes(classes[1:], seam, wrap):
                    pass

    def restore(self) -> None:
        """Puts every override back, except where somebody else has put something in its place since."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._inside.clear()

    # -- what the plugin asks ---------------------------------------------------------------------

    def entries_of(self, model: nn.Module) -> Entries:
        """How a model and its block of layers are entered now. Wraps what is not wrapped yet."""
        block: Any = model.decoder
        return Entries(
            Entry(self._levels_of(model, self._of_models, self._overriding_model)),
            Entry(self._levels_of(block, self._of_blocks, self._overriding_block)),
            type(block).__qualname__,
        )

    def look_at(self, models: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Wraps what overrides forwards inside models that are new, or that have other forwards now."""
        changed: list[nn.Module] = []
        for root in models:
            known = self._inside.get(root)
            if known is not None:
                now = [(module, forward) for ref, forward in known if (module := ref()) is not None]
                changed += [module for module, forward in now if not _is_still_set(module, forward)]
                if not changed:
                    continue
            self._look_inside(root)
        return self._models_of(models, changed) if changed else ()

    def _look_inside(self, root: nn.Module) -> None:
        found: list[nn.Module] = []
        for model in root.modules():
            if isinstance(model, tuple(self._of_models)):
                self.entries_of(model)
                found += [model, model.get_submodule("decoder")]
        own = [(module, vars(module).get("forward")) for module in found]
        self._inside[root] = [
            (weakref.ref(module), None if forward is None else _weakly(forward)) for module, forward in own
        ]

    def _models_of(self, roots: Sequence[nn.Module], changed: Sequence[nn.Module]) -> list[nn.Module]:
        """The models among the changed modules, and those whose block is one of them."""
        inside = [model for root in roots for model in root.modules()]
        models: list[Any] = [model for model in inside if isinstance(model, tuple(self._of_models))]
        return [model for model in models if any(one is model or one is model.decoder for one in changed)]

    # -- finding ----------------------------------------------------------------------------------

    def _levels_of(
        self, module: nn.Module, owners: Mapping[type, tuple[Seam, Level]], wrap: Wrap
    ) -> list[Level]:
        classes = type(module).__mro__
        owner = next((cls for cls in classes if cls in owners), None)
        if owner is None:
            return []
        seam, innermost = owners[owner]
        levels = [*self._of_classes(classes[: classes.index(owner) + 1], seam, wrap)]
        if innermost not in levels:  # replaced by somebody since, who may still call it
            levels.append(innermost)
        forward = vars(module).get("forward")
        if forward is None:
            return levels
        function = getattr(forward, "__func__", None) if _is_bound(forward, module) else None
        level = _level_of(function)
        if level in levels:  # a class's own, set on the instance
            return levels[levels.index(level) :]
        return [self._of_instance(module, forward, seam, wrap) if level is None else level, *levels]

    def _of_classes(self, classes: Sequence[type], seam: Seam, wrap: Wrap) -> Iterator[Level]:
        for cls in classes:
            function = vars(cls).get("forward")
            if function is None:
                continue
            level = _level_of(function)
            if level is None:
                level = _override(f"{cls.__module__}.{cls.__qualname__}.forward", function, seam)
                wrapped = _marked(functools.wraps(function)(wrap(level)), level)
                self._undo.append(functools.partial(_put_back_on_class, cls, function, wrapped))
                cls.forward = wrapped  # type: ignore[attr-defined]
            yield level

    def _of_instance(self, module: nn.Module, forward: Any, seam: Seam, wrap: Wrap) -> Level:
        where = f"{getattr(forward, '__module__', '?')}.{getattr(forward, '__qualname__', repr(forward))}"
        is_bound = _is_bound(forward, module)
        function: Any = forward.__func__ if is_bound else _taking_module(forward)
        # The module alone keeps what wraps the function, and that keeps the function and what was set.
        held = _weakly(function)
        level = _override(f"{where} of a {type(module).__qualname__}", function, seam, held)
        wrapped = _marked(functools.wraps(function)(wrap(level)), level, forward)
        self._undo.append(functools.partial(_put_back_on, weakref.ref(module), weakref.ref(wrapped)))
        vars(module)["forward"] = types.MethodType(wrapped, module)
        return level

    # -- wrapping ---------------------------------------------------------------------------------

    def _overriding_model(self, level: Level) -> Callable[..., Any]:
        """Acts as the wrapped forward of Megatron does, or notices that nothing further in was reached."""
        plugin, original = self._plugin, level.function
        acting = self._wrappers.model_forward(level)

        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
                with plugin.untouched(model):
                    return original(model, *args, **kwargs)
            graphs = plugin.graphs_of_model(model)
            entry = graphs.entries.model
            if entry.acting is level and not level.missing:
                return acting(model, *args, **kwargs)
            if entry.is_inside(level):
                return original(model, *args, **kwargs)
            reached = entry.reached
            out = original(model, *args, **kwargs)
            if entry.reached == reached:
                graphs.count_as_given(graphs.entries.model_bypassed(level))
            return out

        return forward

    def _overriding_block(self, level: Level) -> Callable[..., Any]:
        """The same for a block: its layers are replaced one by one."""
        graphs_of_block, original = self._plugin.graphs_of_block, level.function
        places = places_of(original)

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            graphs = graphs_of_block(key_of(block))
            if graphs is None or graphs.running is None:
                return original(block, *args, **kwargs)
            batch, entry = graphs.running, graphs.entries.block
            given = Arguments(places, args, kwargs)
            if entry.acting is level and isinstance(batch, MicroBatch):
                entry.reached += 1
                return _one_by_one(graphs, batch, functools.partial(original, block), given)
            if entry.is_inside(level):
                return original(block, *args, **kwargs)
            reached = entry.reached
            out = original(block, *args, **kwargs)
            if entry.reached == reached:
                reason = graphs.entries.block_bypassed(level, decided_as_given(batch))
                graphs.count_as_given(reason, given.get("hidden_states"))
            return out

        return forward


def _one_by_one(
    graphs: ModelGraphs, batch: MicroBatch, original: Callable[..., Any], given: Arguments
) -> Any:
    """Runs a block of layers, each of which replays or runs eager by itself."""
    loop = graphs.begin(batch, given.get("hidden_states"), given.get("rotary_pos_emb"), None)
    given.put("packed_seq_params", batch.params)
    block = graphs.block
    count_site = functools.partial(block.count_eager, sites=1)
    constants = block.constants[batch.key]
    layers = LayersOneByOne(batch, block.layers.plan, block.bank, constants, loop, count_site)
    try:
        with layers.shadowing():
            out = original(*given.args, **given.kwargs)
    finally:
        if loop is not None:
            graphs.end(batch, loop)
    if loop is not None and layers.num_called == 0:
        graphs.count_as_given(graphs.entries.block_missed(None))
    return out


def _override(
    where: str, function: Callable[..., Any], seam: Seam, held: Callable[[], Any] | None = None
) -> Level:
    names = inspect.signature(function).parameters
    missing = [name for name in seam.parameters if name not in names]
    return Level(where=where, overrides=seam.path, missing=missing, held=held or (lambda: function))


def _marked(wrapped: Callable[..., Any], level: Level, before: Any = None) -> Callable[..., Any]:
    """A wrapper that says which level it is, and keeps what was set on an instance before.

    Whoever wraps it copies the mark, which hence names it.
    """
    vars(wrapped)["_megagraph"] = weakref.ref(wrapped), level, before
    return wrapped


def _level_of(function: Any) -> Level | None:
    """The level that a function is the wrapper of, or None."""
    mark = getattr(function, "_megagraph", None)
    return mark[1] if mark is not None and mark[0]() is function else None


def _is_bound(forward: Any, module: nn.Module) -> bool:
    return isinstance(forward, types.MethodType) and forward.__self__ is module


def _taking_module(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is not bound to the module it is set on, as one that takes the module first."""

    def function(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    own = inspect.signature(function).parameters["_module"]
    signature = inspect.signature(forward)
    named = own.replace(kind=own.POSITIONAL_ONLY)
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[named, *signature.parameters.values()]
    )
    return function


def _weakly(held: Any) -> Callable[[], Any]:
    """Gives what is held as long as somebody else keeps it; for ever where nothing can refer to it weakly."""
    try:
        return weakref.ref(held)
    except TypeError:
        return lambda: held


def _is_still_set(module: nn.Module, forward: Callable[[], Any] | None) -> bool:
    now = vars(module).get("forward")
    return now is None if forward is None else now is not None and now is forward()


def _put_back_on_class(cls: Any, function: Callable[..., Any], wrapped: Callable[..., Any]) -> None:
    if vars(cls).get("forward") is wrapped:
        cls.forward = function


def _put_back_on(module: weakref.ref[nn.Module], wrapped: weakref.ref[Any]) -> None:
    """Past `nn.Module`'s own bookkeeping, and only where nobody has set another forward since."""
    found = module()
    forward = None if found is None else vars(found).get("forward")
    function = getattr(forward, "__func__", None)
    if found is not None and function is not None and function is wrapped():
        vars(found)["forward"] = vars(function)["_megagraph"][2]
