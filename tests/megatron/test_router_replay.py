# SPDX-License-Identifier: Apache-2.0
"""Routers that are told what to choose: eager beside graphed attention, on the rows that were given."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from moe_rig import EXPERTS, ExpertTrainer
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.config import GraphConfig

pytestmark = pytest.mark.usefixtures("experts")

TOPK = 2
WHY = "its router may be told what to choose, of which a graph would not hear; name 'attn' alone"
ACTIONS = ("RECORD", "REPLAY_FORWARD", None)
FULL = rig.Micro(lengths=(20, 14, 30), seed=3)


def targets(micro: rig.Micro, layer: int) -> Tensor:
    """Two experts for each row that a pack has, int64 [rows, 2]."""
    generator = torch.Generator().manual_seed(100 * micro.seed + layer)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(micro.physical)])


class Told(list[rig.Micro]):
    """Micro-batches, before each of which core's routers are told what to do with it."""

    @contextmanager
    def telling(self, trainer: ExpertTrainer) -> Iterator[None]:
        self.recorded: list[Tensor] = []
        self._replays, self._device = [it.router_replay for it in trainer.routers()], trainer.device
        yield
        self._collect()

    def __iter__(self) -> Iterator[rig.Micro]:
        for index, micro in enumerate(super().__iter__()):
            self._collect()
            action = ACTIONS[(micro.seed + index) % len(ACTIONS)]
            for layer, replay in enumerate(self._replays):
                replay.clear_indices()
                replay.clear_router_replay_action()
                if action is not None:
                    replay.set_router_replay_action(RouterReplayAction[action])
                if action == "REPLAY_FORWARD":
                    replay.set_target_indices(targets(micro, layer).to(self._device))
            yield micro

    def _collect(self) -> None:
        """Takes what was recorded of the micro-batch before."""
        found = [replay.get_recorded_indices() for replay in self._replays]
        self.recorded += [each.clone() for each in found if each is not None]


def run(
    config: GraphConfig | None, given: Sequence[Sequence[rig.Micro]], **changes: Any
) -> tuple[rig.Run, list[Tensor]]:
    """Trains a fresh model whose routers record and replay. Returns what they have recorded, too."""
    steps = [Told(micros) for micros in given]
    how = {"moe_enable_routing_replay": True, "around": lambda trainer, index: steps[index].telling(trainer)}
    found = rig.train(config, steps, ExpertTrainer, **how, **changes)
    return found, [each for told in steps for each in told.recorded]


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "attention": (("attn",), {}),
    "allgather, bias": (("attn",), {**moe_rig.GATHERS, **moe_rig.BIAS}),
    "jitter, drop": (("attn",), {**moe_rig.CASES["jitter"], **moe_rig.DROPS}),
    "moe_router": (("attn", "moe_router"), {}),
    "moe": (("attn", "moe"), moe_rig.PADS),
}


@pytest.mark.parametrize(("case", "masks"), [*((case, False) for case in CASES), ("attention", True)])
def test_bits(case: str, masks: bool) -> None:
    """Three packs a step, with other actions and targets for each."""
    scopes, changes = CASES[case]
    given = rig.steps_of(13 if rig.ON_GPU else 3, masks=masks)
    eager = run(rig.graph_config(mode="eager"), given, **changes)
    graphed = run(rig.graph_config(cuda_graph_modules=scopes), given, **changes)
    assert_same_bits(eager, graphed)
    rows = [m.physical for ms in given for i, m in enumerate(ms) if ACTIONS[(m.seed + i) % 3] == "RECORD"]
    assert [tuple(each.shape) for each in graphed[1]] == [(n, TOPK) for n in rows for _layer in range(2)]
    report = rig.ran(graphed[0].report, failures=2 * len(scopes[1:]), layers=2, WARMING_UP=3 * 2)
    assert report["failures"] == [
        f"layer {index} (TransformerLayer): {scope} stays eager (SCOPE_UNSUPPORTED): {WHY}"
        for index in range(2)
        for scope in scopes[1:]
    ]


def test_megatron_alone_chooses_and_records_the_same() -> None:
    """Where no row was added, to the bit. Else what is recorded; losses and gradients but for roundings."""
    small = rig.Micro(lengths=(9, 20), seed=1)
    given = [[FULL, FULL, FULL], [small, small, small]] * 2
    # A mask of no rows changes how losses of experts are rounded.
    lossless = moe_rig.CASES["groups, no losses"]
    alone = run(None, given, **lossless)
    graphed = run(rig.graph_config(cuda_graph_modules="attn"), given, **lossless)
    assert graphed[0].report["replays"] == 3 * 3 * 2
    assert_same_bits(alone[0].steps[0], graphed[0].steps[0])
    assert all(map(torch.equal, alone[1], graphed[1]))
    for one, other in zip(alone[0].steps, graphed[0].steps, strict=True):
        torch.testing.assert_close(one.losses, other.losses)
        torch.testing.assert_close(one.grads, other.grads, atol=1e-5, rtol=1e-3)


def host_routing(seen: list[tuple[int, Tensor | None]]) -> AbstractContextManager[Any]:
    """Puts in place of `TopKRouter.routing`, as verl, one that knows nothing of rows that were added. Notes
    of each call the rows and the mask."""

    def routing(router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen.append((logits.size(0), None if padding_mask is None else padding_mask.clone()))
        scores = logits.view(-1, EXPERTS).softmax(-1, dtype=torch.float32)
        rows = torch.arange(scores.size(0), device=scores.device)
        chosen = torch.stack([rows % EXPERTS, (rows + 1 + len(seen) % 3) % EXPERTS], dim=1)
        routing_map = torch.zeros_like(scores, dtype=torch.bool).index_put(
            (rows[:, None], chosen), torch.tensor(True, device=scores.device)
        )
        return scores.type_as(logits) * routing_map, routing_map

    return mock.patch.object(TopKRouter, "routing", routing)


@pytest.mark.parametrize(("when", "masks"), [("before", False), ("after", True)])
def test_routing_of_a_hosts_sees_the_rows_that_were_given(when: str, masks: bool) -> None:
    given = rig.steps_of(3, masks=masks)
    found, is_before = [], when == "before"
    of_calls = [micro for micros in given for micro in micros for _layer in range(2)]
    for mode in ("eager", "graph"):
        config = rig.graph_config(mode=mode, cuda_graph_modules=("attn", "moe_router"))
        seen: list[tuple[int, Tensor | None]] = []
        with host_routing(seen) if is_before else nullcontext():
            megagraph.install(config)
            with nullcontext() if is_before else host_routing(seen):
                trainer = ExpertTrainer()
                found.append([rig.step(trainer, micros) for micros in given])
                report = rig.report_of(trainer)
            megagraph.uninstall()  # behind the patch that came behind it, which puts the plugin's back
        for (rows, mask), micro in zip(seen, of_calls, strict=True):
            wanted = micro.padding_mask()
            assert rows == micro.physical and (mask is None) == (wanted is None)
            assert mask is None or wanted is None or torch.equal(mask.cpu(), wanted.transpose(0, 1))
    assert_same_bits(*found)
    rig.ran(report, 2 * 3 * 2, failures=2, WARMING_UP=3 * 2)


def test_routers_that_are_told_later_and_recomputed_raise(install: rig.Install) -> None:
    """In the backward pass nobody would know how many rows they have choices for."""
    install(cuda_graph_modules="attn")
    trainer = ExpertTrainer(**moe_rig.CASES["recomputed"])
    rig.step(trainer, [FULL], times=2)
    for router in trainer.routers():
        router.router_replay = RouterReplay()
    with pytest.raises(RuntimeError, match="expected no 'moe' in recompute_modules"):
        rig.step(trainer, [FULL])
