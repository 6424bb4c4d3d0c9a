# SPDX-License-Identifier: Apache-2.0
"""What the modules of a model take for the ranks that share a pack, and what ranks cannot share packs in.

Note [View of a micro-batch]
Released layers know one context-parallel group, the model's own. Attention rotates by it whoever shares the
pack, multi-latent attention cuts its rotary tables by the config's number of ranks and refuses packs that
name their own. So while a micro-batch of some ranks runs, eager or in a capture, these stand wherever a
module looks for the model's group, and the pack names none. Afterwards everything is as before, after an
error, too.
What runs in the backward does not look there: ops keep the group they ran with, and recomputing is refused.

Every rank that shares a pack records its part of a router's loss. At the end of a step Megatron adds the
parts up over one group, and takes the mean over all others. That is right for packs which the ranks of that
group share; a part of any other pack would count too little, or too often. So metrics of packs that other
ranks share than the model's own are counted as if those had shared them.
"""

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn

from megagraph import _C
from megagraph.log import log
from megagraph.megatron.parallel.context import ContextRanks
from megagraph.megatron.parallel.groups import COLLECTIONS
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.seams import (
    ENGINE_ATTENTION,
    PACKED_SEQ_PARAMS,
    is_engine_attention,
    is_replaced,
    metric_group,
    moe_metrics,
    router_losses_count_ranks,
    set_metric_group,
)
from megagraph.megatron.watch import IGNORED_ATTRIBUTES
from megagraph.modules import VarlenAttention

__all__ = ["ContextView", "unsupported_sharing"]

# Of a module: its group; a router's, over which it adds up its losses; and beside the group of Transformer
# Engine's attention, its ranks in the job and a stream.
_GROUP, _OF_LOSSES, _RANKS, _STREAM = "cp_group", "tp_cp_group", "cp_global_ranks", "cp_stream"
_OF_MODULES = (_GROUP, _OF_LOSSES, _RANKS, _STREAM)
# Of a config: the number of ranks, and how much routers' losses weigh.
_SIZE, _WEIGHTS = "context_parallel_size", ("moe_aux_loss_coeff", "moe_z_loss_coeff")


class ContextView:
    """Shows a model, held weakly, the ranks that share a micro-batch, unless all packs are shared alike."""

    def __init__(self, model: nn.Module, ranks: ContextRanks) -> None:
        self._ranks, self._model = ranks, weakref.ref(model)
        self.is_on = ranks.is_dynamic
        self._shows_others = ranks.sizes != (ranks.size,)
        # csrc/watch/state_watch.h, Note [State]: while the model's is as it was, so are the next two.
        self._watch: _C.StateWatch | None = None
        self._state = 0
        self._places: Sequence[tuple[Any, str]] = ()
        self._unsupported: str | None = None
        self._stream: torch.cuda.Stream | None = None
        self.follow()
        config: Any = model.config
        if self._shows_others and not config.calculate_per_token_loss:
            log.warning(
                "cp_sizes: losses are means of micro-batches (calculate_per_token_loss=False): packs weigh "
                "alike however many tokens they hold"
            )

    def follow(self) -> None:
        """Before steps: looks for modules, and what they look in, that were replaced since.

        Raises `ValueError` for what would not look where this shows the ranks, naming it.
        """
        model: Any = self._model()
        if model is None or not self.is_on:
            return
        if self._watch is None or self._watch.now(True) != self._state:
            modules, block = [weakref.ref(module) for module in model.modules()], weakref.ref(model.decoder)
            self._watch = _C.StateWatch(modules, block, IGNORED_ATTRIBUTES, lambda _hook: True, [])
            self._places = list(_places_in(model))
            self._unsupported = _unsupported_dynamic_sharing(model)
            self._state = self._watch.now(True)
        if self._shows_others:
            self._check()

    def _check(self) -> None:
        if self._unsupported is not None:
            raise ValueError(
                "cp_sizes: expected a model that can run packs of several context-parallel sizes, got "
                f"{self._unsupported}"
            )

    def refuse(self, what: str) -> None:
        """Raises `ValueError` for a model that `what` keeps eager, if eager may not see its ranks."""
        if self.is_on and self._shows_others:
            raise ValueError(f"cp_sizes: expected a model that graphs take, got: {what}")

    def of_layers(self, params: Any) -> Any:
        """A pack as layers get it: without ranks of its own, which they see all around."""
        return params if not self.is_on or params is None else _C.without_ranks(params)

    def of_size(self, cp_size: int) -> contextlib.AbstractContextManager[None]:
        """Around what runs for ranks of the model's group of a size."""
        return self._showing(cp_size, self._ranks.of_size(cp_size), leaves_metrics=False)

    def of_pack(self, params: Any) -> contextlib.AbstractContextManager[None]:
        """Around a model that runs a pack as given, or none, by the ranks that it names."""
        size = getattr(params, "local_cp_size", None)
        return self._showing(self._ranks.size if size is None else size, getattr(params, "cp_group", None))

    @contextlib.contextmanager
    def _showing(
        self, cp_size: int, group: distributed.ProcessGroup | None, *, leaves_metrics: bool = True
    ) -> Iterator[None]:
        if not self.is_on or self._ranks.are_own(cp_size, group):
            yield
            return
        self._check()
        shown = _alone() if cp_size == 1 else group
        if shown is None or shown.size() != cp_size:
            found = "none" if shown is None else f"one of {shown.size()} ranks"
            raise ValueError(f"expected a cp_group of local_cp_size {cp_size}, got {found}")
        times = cp_size / self._ranks.size
        places = ((held() if isinstance(held, weakref.ref) else held, name) for held, name in self._places)
        owners: list[tuple[Any, str]] = [(vars(owner), name) for owner, name in places if owner is not None]
        before = [(values, name, values[name]) for values, name in owners]
        own = next((group for _, name, group in before if name == _OF_LOSSES and group is not None), None)
        try:
            for values, name, value in before:
                values[name] = self._value(name, value, shown, times)
            with _counted_as_shared_by(own, shown, times if leaves_metrics else 1):
                yield
        finally:
            for values, name, value in before:
                values[name] = value

    def _value(self, name: str, value: Any, shown: distributed.ProcessGroup, times: float) -> Any:
        if name == _SIZE:
            return shown.size()
        if name in _WEIGHTS:
            return _scaled(value, times)
        if name == _RANKS:
            return distributed.get_process_group_ranks(shown) if shown.size() > 1 else None
        if name == _STREAM:
            if shown.size() > 1 and self._stream is None:
                self._stream = torch.cuda.Stream()  # for attention of other ranks' keys
            return self._stream if shown.size() > 1 else None
        return shown


def _owners_in(module: nn.Module) -> Iterator[tuple[Any, Collection[str]]]:
    """What a module may look for ranks in, and under which names."""
    values = vars(module)
    yield module, _OF_MODULES
    for name in COLLECTIONS:
        yield values.get(name), ("cp",)
    config = values.get("config")
    weighs = getattr(config, "calculate_per_token_loss", False) and not router_losses_count_ranks()
    yield config, (_SIZE, *_WEIGHTS) if weighs else (_SIZE,)


def _places_in(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Where modules look for the ranks, each place once: groups, and their number."""
    met: set[tuple[int, str]] = set()
    for module in model.modules():
        for owner, names in _owners_in(module):
            for name in names:
                if name in getattr(owner, "__dict__", ()) and (id(owner), name) not in met:
                    met.add((id(owner), name))
                    yield _held(owner), name


def _scaled(weight: Any, times: float) -> Any:
    """Of one loss, of several, or of none."""
    if weight is None:
        return None
    return [each * times for each in weight] if isinstance(weight, list) else weight * times


def _held(owner: Any) -> Any:
    """A weak reference, or itself if there can be none, as to a host's own config."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return owner


@functools.cache
def _alone() -> distributed.ProcessGroup:
    """A group of this rank, for what asks for its size and its place and no more."""
    return distributed.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's own, which stubs do not show


@contextlib.contextmanager
def _counted_as_shared_by(own: Any, shown: Any, times: float) -> Iterator[None]:
    """Around what runs a pack that `times` as many ranks share as metrics are added up over: those of `own`.

    Routers see the group `shown` meanwhile.
    """
    if own is None:
        yield
        return
    before = {} if times == 1 else {name: values.clone() for name, values in moe_metrics().items()}
    try:
        yield
    finally:
        for name, values in moe_metrics().items():
            group = metric_group(name)
            if group is not own and group is not shown:
                continue  # a mean of its own, or over all ranks
            set_metric_group(name, own)
            if times != 1:
                earlier = before.get(name, 0)
                values.sub_(earlier).mul_(times).add_(earlier)


_HIERARCHICAL = "a2a+p2p"  # its ranks are in two groups, which Megatron makes for one number of them


def unsupported_sharing(model: Any) -> str | None:
    """The first thing in a model that ranks cannot share packs in, in words; None if they can."""
    cores = [
        core for module in model.modules() if (core := getattr(module, "core_attention", None)) is not None
    ]
    others = sorted({type(core).__name__ for core in cores if not _is_known(core)})
    # It gets the rows past a pack's end as one document more, of padding alone.
    says_padding = "pad_between_seqs" in vars(PACKED_SEQ_PARAMS.function())
    found = {
        **{f"attention of class {name}": True for name in others},
        "Transformer Engine's attention, of packs that cannot say pad_between_seqs": (
            not says_padding and any(map(is_engine_attention, cores))
        ),
        "Mamba layers": any(hasattr(module, "mixer") for module in model.modules()),
        "multi-token prediction": getattr(model, "mtp", None) is not None,
        "experts over several ranks that need equal rows": need_equal_rows(model.config),
        f"cp_comm_type={_HIERARCHICAL!r}": any(
            getattr(core, "cp_comm_type", None) == _HIERARCHICAL for core in cores
        ),
    }
    return next((name for name, is_there in found.items() if is_there), None)


def _unsupported_dynamic_sharing(model: Any) -> str | None:
    """The same if each pack says by how many ranks it is shared.

    What runs in the backward does not see them. A router's losses are summed over one group of tensor- and
    context-parallel ranks, which Megatron has for one number of them, and its global loss in each micro-batch
    over ranks of other packs.
    """
    config: Any = model.config
    granularity = config.recompute_granularity
    losses = config.moe_router_load_balancing_type if has_experts(config) else ()  # one name, or a list
    found = {
        f"recompute_granularity={granularity!r}": granularity is not None,
        "routers with a global_aux_loss": "global_aux_loss" in losses,
        "experts with tensor parallelism": has_experts(config) and config.tensor_model_parallel_size > 1,
    }
    return unsupported_sharing(model) or next((name for name, is_there in found.items() if is_there), None)


def _is_known(core: nn.Module) -> bool:
    is_engines = is_engine_attention(core) and not is_replaced(core, ENGINE_ATTENTION)
    return isinstance(core, VarlenAttention) or is_engines
