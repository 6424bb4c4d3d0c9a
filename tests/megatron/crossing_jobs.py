# SPDX-License-Identifier: Apache-2.0
"""What ranks run while something happens beside packs that say by how many ranks they are shared."""

import copy
import gc
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import context_jobs
import context_models
import megatron_rig as rig
import moe_rig
import torch
from sharing_jobs import STEPS, fail, install, losses_of, micros_of, new_trainer, warmed
from torch import Tensor, distributed, nn

import megagraph
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.parallel.context_view import ContextView
from megagraph.megatron.parallel.groups import COLLECTIONS
from megagraph.megatron.parallel.peers import Peers

_PLACES = ("cp_group", "tp_cp_group", "cp_global_ranks", "cp_stream")  # of modules


def run_beside_foreign_modules() -> dict[str, Any]:
    """Runs a model with modules of a host's, whose configs are none of Megatron's."""
    trainer = new_trainer()
    table, spaced = nn.Identity(), nn.Identity()
    table.config = {"context_parallel_size": 1}  # type: ignore[assignment]
    spaced.config = SimpleNamespace(context_parallel_size=1)  # type: ignore[assignment]
    trainer.chunk.adapters = nn.ModuleList([table, spaced])
    micros, seen = warmed(trainer), []
    note = lambda *_: seen.append(spaced.config.context_parallel_size)  # noqa: E731
    hook = trainer.chunk.output_layer.register_forward_hook(note)
    rig.step(trainer, micros)
    hook.remove()
    return {
        "eager": rig.report_of(trainer)["eager"],
        "seen": seen,
        "size": spaced.config.context_parallel_size,
    }


def _seen(trainer: Trainer) -> dict[tuple[str, str], Any]:
    """What modules and metrics of routers find where they look for their ranks."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in trainer.chunk.named_modules():
        values = vars(module)
        own = {of: values[of] for of in _PLACES if of in values}
        groups = {of: values[of].cp for of in COLLECTIONS if values.get(of) is not None}
        size = {"size": values["config"].context_parallel_size} if "config" in values else {}
        found |= {(name, of): value for of, value in {**own, **groups, **size}.items()}
    return found | {(name, "metric"): seams.metric_group(name) for name in seams.moe_metrics()}


@moe_rig.experts_on_cpu()
def look_at_own_ranks() -> bool:
    """Whether a model sees what it always does while packs of its own ranks are captured."""
    context_jobs.start(2, 2)
    parallel = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    trainer = new_trainer(model={"experts": True}, cp_sizes=(2,), **parallel)
    peers, before = Peers(trainer.chunk, (2,)), _seen(trainer)
    assert peers.context.of_size(2) is not peers.context.own_group()
    with peers.view.of_size(2):
        return _seen(trainer) == before


@moe_rig.experts_on_cpu()
def raise_inside(*, is_inside: bool, model: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Raises while a model sees two ranks, in one of its layers or behind them all."""
    rig.forget_metrics()
    trainer = new_trainer(model=model, **config)
    shared, _ = warmed(trainer)
    expected, before = losses_of(trainer, shared), _seen(trainer)
    seen: list[dict[tuple[str, str], Any]] = []

    def look_and_fail(*_args: Any) -> None:
        seen.append(_seen(trainer))
        fail()

    chunk = trainer.chunk
    hook = (chunk.decoder.layers[1].mlp if is_inside else chunk.output_layer).register_forward_hook(
        look_and_fail
    )
    try:
        losses_of(trainer, shared)
    except RuntimeError as error:
        assert str(error) == "on purpose"
    hook.remove()
    return {
        "differed": sum(value is not before[place] for place, value in seen[0].items()),
        "is_as_before": _seen(trainer) == before,
        "is_same": torch.equal(losses_of(trainer, shared), expected),
    }


def order_of_sizes() -> tuple[list[int], list[int]]:
    """In which order communicators of several sizes are used first, and graphs of them captured."""
    sizes, used, captured = (1, 2, 4), [], []
    trainer, groups = new_trainer(cp_sizes=sizes), megagraph.context_groups(sizes)
    reduce, show = distributed.all_reduce, ContextView.of_size

    def note_use(tensor: Tensor, *, group: Any) -> None:
        used.append(group.size())
        reduce(tensor, group=group)

    def note_capture(view: ContextView, cp_size: int) -> Any:
        captured.append(cp_size)
        return show(view, cp_size)

    with mock.patch.object(distributed, "all_reduce", note_use):
        groups.warm_up(trainer.device)
    with mock.patch.object(ContextView, "of_size", note_capture):
        for _ in range(STEPS):
            rig.step(trainer, micros_of(groups.of_size(2)))
    assert rig.report_of(trainer)["replays"] > 0
    return used, captured


def change_between_steps() -> tuple[bool, str]:
    """Replaces a module, which then sees the ranks of a pack, and turns on what would not see them."""
    trainer = new_trainer()
    micros, seen = warmed(trainer), []
    attention: Any = trainer.chunk.decoder.layers[0].self_attention
    attention.core_attention = copy.deepcopy(attention.core_attention)
    note = lambda *_: seen.append(attention.core_attention.cp_group)  # noqa: E731
    hook = trainer.chunk.output_layer.register_forward_hook(note)
    rig.step(trainer, micros)
    hook.remove()
    trainer.chunk.config.recompute_granularity = "selective"
    try:
        rig.step(trainer, micros)
    except ValueError as error:
        return seen == [micros[0].group, None], str(error)
    return False, "no error"


def ask_for_longer_tables(*, model: dict[str, Any]) -> dict[str, Any]:
    """Trains, and between any two steps lets another model run packs that are longer, and longer again."""
    install()
    config = {"calculate_per_token_loss": True}
    make = partial(context_models.trainer, config=config, **model)
    pair, other = rig.Pair(make), make()
    micros = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    rubbish: list[Tensor] = []
    pair.step(*micros)
    for index in range(3):
        pair.step(*micros)
        rig.evaluate(other, [rig.Micro(lengths=(65 + 40 * index + more,)) for more in range(40)])
        gc.collect()
        rubbish += [torch.full((64, 64), float("nan"), device=other.device) for _ in range(64)]
    _, report, _ = megagraph.reports()
    return dict(report["eager"])
