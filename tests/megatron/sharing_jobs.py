# SPDX-License-Identifier: Apache-2.0
"""What ranks do around packs that some of them share: other groups, errors, and the end of groups."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import context_jobs
import context_models
import megatron_rig as rig
import moe_rig
import torch
from context_jobs import OwnMicro
from megatron.core import parallel_state
from streams import make_groups
from torch import Tensor, distributed

import megagraph
from megagraph.decide.dispatch import PackForm, VariantKey
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.shared_kinds import SharedKinds
from megagraph.megatron.parallel.peers import Peers

STEPS = 2  # one warms up
_KIND = VariantKey(None, PackForm(False, False, None), grad=True)


def new_trainer(
    *, model: dict[str, Any] | None = None, cp_sizes: tuple[int, ...] = (1, 2), **config: Any
) -> Trainer:
    install(cp_sizes=cp_sizes, has_experts="experts" in (model or {}))
    return context_models.trainer(config={"calculate_per_token_loss": True, **config}, **(model or {}))


def install(*, cp_sizes: tuple[int, ...] = (1, 2), has_experts: bool = False) -> None:
    capacity = {"capacities": (), "cuda_graph_max_packed_seqs": (5,), "max_seqlen_per_dp_cp_rank": 64}
    scopes = {"cuda_graph_modules": ("attn", "moe_router")} if has_experts else {}
    megagraph.install(rig.graph_config(cp_sizes=cp_sizes, **capacity, **scopes))


def micros_of(group: Any) -> list[OwnMicro]:
    """One of both ranks, and one of this rank alone."""
    lengths = (20, 8), (12, 4, 6)
    return [
        OwnMicro(lengths=of_one, padded=of_one, seed=index, group=each)
        for index, (of_one, each) in enumerate(
            zip((tuple(4 * -(-n // 4) for n in of) for of in lengths), (group, None), strict=True)
        )
    ]


def warmed(trainer: Trainer) -> list[OwnMicro]:
    """Trains until everything has graphs."""
    micros = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    for _ in range(STEPS):
        rig.step(trainer, micros)
    return micros


def end(way: str) -> None:
    """Ends a job whose graphs hold communicators of several sizes."""
    trainer = new_trainer()
    micros = warmed(trainer)
    assert rig.report_of(trainer)["replays"] > 0
    if way == "raised":
        trainer.chunk.output_layer.register_forward_hook(fail)
        rig.step(trainer, micros)
    if way == "released":
        megagraph.uninstall()
    if way != "forgotten":
        distributed.destroy_process_group()


def fail(*_args: Any) -> None:
    raise RuntimeError("on purpose")


def losses_of(trainer: Trainer, micro: OwnMicro) -> Tensor:
    trainer.zero_grad()
    return torch.cat(rig.schedule(trainer.model, [micro], 1, trainer.device))


def another_group() -> dict[str, Any]:
    """Runs a pack of two ranks with a group of theirs that no graph knows."""
    trainer = new_trainer()
    shared, _ = warmed(trainer)
    losses, before = losses_of(trainer, shared), rig.report_of(trainer)["eager"]
    other = dataclasses.replace(shared, group=distributed.new_group([0, 1]))
    found = losses_of(trainer, other)
    after = rig.report_of(trainer)["eager"]
    changed = {name: (after[name] - before.get(name, 0)) // rig.LAYERS for name in after}
    return {
        "eager": {name: number for name, number in changed.items() if number},
        "is_same": torch.equal(losses, found),
    }


def groups_of_more_sizes() -> dict[str, Any]:
    """Runs packs whose groups a host has asked for together with others than the plugin's."""
    trainer = new_trainer()
    groups = megagraph.context_groups((1, 2, 4))
    for _ in range(STEPS):
        rig.step(trainer, micros_of(groups.of_size(2)))
    return dict(rig.report_of(trainer)["eager"])


def anew() -> dict[str, Any]:
    """Goes on after all of Megatron's groups have been destroyed and made again."""
    trainer = new_trainer()
    warmed(trainer)
    before = rig.report_of(trainer)
    context_jobs.start(1)
    warmed(trainer)
    after = rig.report_of(trainer)
    return {
        "replays": after["replays"] - before["replays"],
        "eager": {name: after["eager"][name] - before["eager"].get(name, 0) for name in after["eager"]},
        "failures": after["failures"],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LongMicro(OwnMicro):
    """One whose pack says that a document may have all of its rows."""

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        params.max_seqlen_q = params.max_seqlen_kv = self.physical
        return params


def unlike_on_ranks() -> dict[str, Any]:
    """Two ranks share packs that no graph takes, the others have packs of their own."""
    trainer = new_trainer()
    shared, own = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    is_sharing = distributed.get_rank() < 2
    micro = _LongMicro(**vars(shared)) if is_sharing else own
    for _ in range(STEPS):
        rig.step(trainer, [micro])
    report = rig.report_of(trainer)
    return {"is_sharing": is_sharing, "eager": set(report["eager"]), "replays": report["replays"]}


@contextmanager
def _hearing() -> Iterator[list[str]]:
    """Warnings of the plugin."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megagraph")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def wait_to_capture(steps: int, *, is_due: bool) -> list[str]:
    """What is logged on rank 0 while rank 1 cannot capture what may be due."""
    kinds = SharedKinds(Peers(new_trainer().chunk, (1, 2)))
    due = {_KIND} if is_due else set()
    with _hearing() as said:
        for _ in range(steps):
            assert not kinds.of_all(due, can_capture=distributed.get_rank() == 0, has_gradients=True)
    return said


def said_of_losses() -> list[list[str]]:
    """What is logged of models whose losses are per token, and are not."""
    found = []
    for is_per_token in (True, False):
        model = new_trainer(calculate_per_token_loss=is_per_token).chunk
        with _hearing() as said:
            Peers(model, (1, 2))
        found.append(said)
        megagraph.uninstall()
    return found


def capture_without_gradients() -> list[tuple[bool, int]]:
    """What all capture while main gradients of rank 1 have no memory: gradients or not, and ranks."""
    kinds = SharedKinds(Peers(new_trainer().chunk, (1, 2)))
    due = {_KIND, _KIND.replace(grad=False)}
    found = kinds.of_all(due, can_capture=True, has_gradients=distributed.get_rank() == 0)
    return sorted((kind.grad, kind.cp_size) for kind in found)


def own_group() -> dict[str, Any]:
    """Packs name the group that the model was built with."""
    context_jobs.start(2)
    trainer = new_trainer(context_parallel_size=2)
    micros = micros_of(parallel_state.get_context_parallel_group())
    for _ in range(STEPS):
        rig.step(trainer, micros)
    return dict(rig.report_of(trainer)["eager"])


def error_of_groups() -> str:
    """What is said where the model's own ranks are no neighbours among those that may share packs."""
    make_groups(context_parallel_size=2, order="tp-dp-cp-ep-pp")
    try:
        rig.step(new_trainer(), micros_of(None))
    except ValueError as error:
        return str(error)
    return ""


def go_on_without_a_group() -> dict[str, Any]:
    """Two of four ranks destroy the group that they share; all go on with packs of four and of one."""
    sizes = (1, 2, 4)
    trainer = new_trainer(cp_sizes=sizes)
    groups = megagraph.context_groups(sizes)
    shared, own = micros_of(groups.of_size(4))
    micros = [dataclasses.replace(shared, lengths=(24, 8), padded=(24, 8)), own]
    for _ in range(STEPS):
        rig.step(trainer, micros)
    before = rig.report_of(trainer)["replays"]
    if distributed.get_rank() < 2:
        distributed.destroy_process_group(groups.of_size(2))
    for _ in range(STEPS):
        rig.step(trainer, micros)
    said = ""
    try:
        megagraph.context_groups(sizes)
    except ValueError as error:
        said = str(error)
    report = rig.report_of(trainer)
    return {
        "eager": report["eager"],
        "graphs": report["graphs"],
        "replays": report["replays"] - before,
        "said": said,
    }


def call_alone() -> dict[str, Any]:
    """One rank calls its model outside of any schedule, more often than the other."""
    trainer = new_trainer()
    _, own = warmed(trainer)
    expected, before = losses_of(trainer, own), rig.report_of(trainer)["eager"]
    is_same = True
    with torch.no_grad():
        for _ in range(2 + distributed.get_rank()):
            losses, _ = rig.forward(trainer.model, own, trainer.device)
            mask = own.row_lists()[2].to(losses.device)
            is_same &= torch.equal(losses.float().view(-1).where(mask > 0, 0.0), expected)
    after = rig.report_of(trainer)["eager"]
    changed = {name: (after[name] - before.get(name, 0)) // rig.LAYERS for name in after}
    return {"eager": {name: number for name, number in changed.items() if number}, "is_same": is_same}


def error_of_slot() -> str:
    """What is said of a second forward of shared packs before a backward."""
    trainer = new_trainer()
    shared, _ = warmed(trainer)

    def twice(data: Any, model: Any) -> Any:
        micro, first = next(data), []
        first.append(rig.forward(model, micro, trainer.device))  # whose backward is still to come
        return rig.forward(model, micro, trainer.device)

    trainer.zero_grad()
    try:
        rig.run_schedule(trainer.model, twice, [shared], 1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def destroy() -> dict[str, int]:
    """Destroys the group of a size while graphs use it."""
    trainer = new_trainer()
    shared, _ = warmed(trainer)
    before = rig.report_of(trainer)["graphs"]
    distributed.destroy_process_group(shared.group)
    return {"before": before, "after": rig.report_of(trainer)["graphs"]}


def error_of_pack(*, change: dict[str, Any]) -> str:
    """What is said of a pack that names its ranks wrongly."""
    trainer = new_trainer()
    shared = micros_of(megagraph.context_groups((1, 2)).of_size(2))[0]
    params = shared.params(trainer.device)
    vars(params).update(change)
    tokens, labels, _, positions = (rows.to(trainer.device)[None] for rows in shared.row_lists())
    given = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": labels}
    try:
        trainer.model(packed_seq_params=copy.copy(params), **given)
    except ValueError as error:
        return str(error)
    return "no error"


@moe_rig.experts_on_cpu()
def error_of_model(*, config: dict[str, Any], model: dict[str, Any]) -> str:
    """What is said of a model that cannot be shown the ranks of a pack."""
    context_jobs.start(1, 1, config.get("expert_model_parallel_size", 1))
    trainer = new_trainer(model=model, **config)
    try:
        rig.step(trainer, micros_of(megagraph.context_groups((1, 2)).of_size(2)))
    except ValueError as error:
        return str(error)
    return "no error"
