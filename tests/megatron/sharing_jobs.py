# SPDX-License-Identifier: Apache-2.0
"""What ranks do around packs that some of them share: other groups, errors, and the end of groups."""

import copy
import dataclasses
from typing import Any

import megatron_rig as rig
import torch
from context_jobs import SharedMicro
from torch import Tensor, distributed

import megagraph
from megagraph.demo.trainer import Trainer

STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMicro(SharedMicro):
    """A micro-batch that says by how many ranks it is shared.

    Args:
        group: of the ranks; None for this one alone.
    """

    group: Any = None

    def sharers(self) -> tuple[int, int]:
        return (1, 0) if self.group is None else (self.group.size(), self.group.rank())

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        params.local_cp_size, params.cp_group = self.sharers()[0], self.group
        return params


def _trainer(**config: Any) -> Trainer:
    capacity = {"capacities": (), "cuda_graph_max_packed_seqs": (5,), "max_seqlen_per_dp_cp_rank": 64}
    megagraph.install(rig.graph_config(cp_sizes=(1, 2), **capacity))
    return Trainer(rig.OPTIONS, config={"calculate_per_token_loss": True, **config})


def _micros(group: Any) -> list[OwnMicro]:
    """One of both ranks, and one of this rank alone."""
    lengths = (20, 8), (12, 4, 6)
    return [
        OwnMicro(lengths=of_one, padded=of_one, seed=index, group=each)
        for index, (of_one, each) in enumerate(
            zip((tuple(4 * -(-n // 4) for n in of) for of in lengths), (group, None), strict=True)
        )
    ]


def _warm(trainer: Trainer) -> list[OwnMicro]:
    """Trains until everything has graphs."""
    micros = _micros(megagraph.context_groups((1, 2)).of_size(2))
    for _ in range(STEPS):
        rig.step(trainer, micros)
    return micros


def _losses(trainer: Trainer, micro: OwnMicro) -> Tensor:
    trainer.zero_grad()
    return torch.cat(rig.schedule(trainer.model, [micro], 1, trainer.device))


def another_group() -> dict[str, Any]:
    """Runs a pack of two ranks with a group of theirs that no graph knows."""
    trainer = _trainer()
    shared, _ = _warm(trainer)
    losses, before = _losses(trainer, shared), rig.report_of(trainer)["eager"]
    other = dataclasses.replace(shared, group=distributed.new_group([0, 1]))
    found = _losses(trainer, other)
    after = rig.report_of(trainer)["eager"]
    changed = {name: (after[name] - before.get(name, 0)) // rig.LAYERS for name in after}
    return {
        "eager": {name: number for name, number in changed.items() if number},
        "is_same": torch.equal(losses, found),
    }


def call_alone() -> dict[str, Any]:
    """One rank calls its model outside of any schedule, more often than the other."""
    trainer = _trainer()
    _, own = _warm(trainer)
    expected, before = _losses(trainer, own), rig.report_of(trainer)["eager"]
    is_same = True
    with torch.no_grad():
        for _ in range(2 + distributed.get_rank()):
            losses, _ = rig.forward(trainer.model, own, trainer.device)
            mask = own.row_lists()[2].to(losses.device)
            is_same &= torch.equal(losses.float().view(-1).where(mask > 0, 0.0), expected)
    after = rig.report_of(trainer)["eager"]
    changed = {name: (after[name] - before.get(name, 0)) // rig.LAYERS for name in after}
    assert changed.pop("GROUP_DISAGREED") == 2 + distributed.get_rank()
    return {
        "eager": {"GROUP_DISAGREED": 2, **{name: n for name, n in changed.items() if n}},
        "is_same": is_same,
    }


def error_of_slot() -> str:
    """What is said of a second forward of shared packs before a backward."""
    trainer = _trainer()
    shared, _ = _warm(trainer)

    def twice(data: Any, model: Any) -> Any:
        micro, first = next(data), []
        first.append(rig.forward(model, micro, trainer.device))  # whose backward is still to come
        return rig.forward(model, micro, trainer.device)

    from megatron.core.pipeline_parallel import get_forward_backward_func

    trainer.zero_grad()
    try:
        get_forward_backward_func()(
            forward_step_func=twice,
            data_iterator=iter([shared]),
            model=[trainer.model],
            num_microbatches=1,
            seq_length=rig.CAPACITY.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
    except RuntimeError as error:
        return str(error)
    return "no error"


def _seen(trainer: Trainer) -> tuple[Any, ...]:
    attention: Any = trainer.chunk.decoder.layers[0].self_attention
    own = attention.core_attention.cp_group
    size = attention.config.context_parallel_size
    return size, attention.pg_collection.cp.size(), None if own is None else own.size()


def raise_inside() -> dict[str, Any]:
    """Lets a layer raise while it sees two ranks."""
    trainer = _trainer()
    shared, _ = _warm(trainer)
    expected = _losses(trainer, shared)
    seen: list[tuple[Any, ...]] = []

    def fail(*_args: Any) -> None:
        seen.append(_seen(trainer))
        raise RuntimeError("on purpose")

    hook = trainer.chunk.output_layer.register_forward_hook(fail)
    try:
        _losses(trainer, shared)
    except RuntimeError as error:
        assert str(error) == "on purpose"
    hook.remove()
    return {
        "inside": seen[0],
        "after": _seen(trainer),
        "is_same": torch.equal(_losses(trainer, shared), expected),
    }


def destroy() -> dict[str, int]:
    """Destroys the group of a size while graphs use it."""
    trainer = _trainer()
    shared, _ = _warm(trainer)
    before = rig.report_of(trainer)["graphs"]
    distributed.destroy_process_group(shared.group)
    return {"before": before, "after": rig.report_of(trainer)["graphs"]}


def error_of_pack(*, change: dict[str, Any]) -> str:
    """What is said of a pack that names its ranks wrongly."""
    trainer = _trainer()
    shared = _micros(megagraph.context_groups((1, 2)).of_size(2))[0]
    params = shared.params(trainer.device)
    vars(params).update(change)
    tokens, labels, _, positions = (rows.to(trainer.device)[None] for rows in shared.row_lists())
    given = {"input_ids": tokens, "position_ids": positions, "attention_mask": None, "labels": labels}
    try:
        trainer.model(packed_seq_params=copy.copy(params), **given)
    except ValueError as error:
        return str(error)
    return "no error"


def error_of_model(*, config: dict[str, Any]) -> str:
    """What is said of a model that cannot be shown the ranks of a pack."""
    trainer = _trainer(**config)
    try:
        rig.step(trainer, _micros(megagraph.context_groups((1, 2)).of_size(2)))
    except ValueError as error:
        return str(error)
    return "no error"
