# SPDX-License-Identifier: Apache-2.0
"""Models that train under expert-parallel overlap: known, counted, with the bits of training without it."""

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import parallel_jobs
import pytest
import torch
from context_jobs import SharedMicro
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron_rig import Micro, Run
from moe_rig import ExpertTrainer
from overlap_rig import CALLS, COUNTS, REDUCES, OverlapTrainer
from same_bits import assert_same_bits
from streams import make_groups, seeded
from test_overlap_alone import ON_GPU, engines
from torch import distributed
from worlds import on_ranks

from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.megatron.seams import packs_have, permutation_sorts, plans_free_what_one_expert_reads

pytestmark = pytest.mark.both

OVERLAP = "overlap_moe_expert_parallel_comm"
SCOPES = [("attn",), ("moe_router",), ("attn", "moe_router")]
if permutation_sorts():  # else it permutes into shapes that only the device knows
    SCOPES += [("moe_router", "moe_preprocess"), ("attn", "moe_router", "moe_preprocess")]


def steps_of(rank: int, number: int) -> list[list[Micro]]:
    """Packs of this rank's own; one has a mask in two, and on rank 1 some between others fit no capacity."""
    shapes, steps = parallel_jobs.SHAPES, list[list[Micro]]()
    for count in itertools.islice(itertools.cycle(COUNTS), number):
        numbers = range(len(steps) * 4, len(steps) * 4 + count)
        of_numbers = [(it, shapes[(it + 3 * rank) % len(shapes)], it if it % 2 else None) for it in numbers]
        steps.append([Micro(seed=50 * rank + it, lengths=of, mask_seed=mask) for it, of, mask in of_numbers])
    for of_misfit in steps[2 :: 4 * len(COUNTS)] if rank == 1 else ():
        of_misfit[1] = Micro(lengths=parallel_jobs.MISFIT)
    return steps


EXPERTS_OF_ALL = {"expert_model_parallel_size": 2}
train = partial(rig.train, make=seeded(OverlapTrainer), evaluate_at=(1, 2), **EXPERTS_OF_ALL)


@functools.cache
def trained_eager(rank: int, number: int, engine: bool) -> tuple[list[list[Micro]], Run]:
    """Steps, and training on them in mode `eager` with overlap, which has the bits of that without."""
    steps, config = steps_of(rank, number), rig.graph_config(mode="eager")
    without, eager = (train(config, steps, engine=engine, **{OVERLAP: it}) for it in (False, True))
    assert_same_bits(without, eager)
    return steps, eager


@pytest.mark.parametrize("number", [4, pytest.param(100, marks=[pytest.mark.gpu, pytest.mark.soak])])
@engines
@pytest.mark.parametrize("scopes", SCOPES, ids="+".join)
@on_ranks(2, timeout_seconds=500)
def test_training_with_overlap_has_the_bits_of_training_without(
    scopes: tuple[str, ...], engine: bool, number: int
) -> None:
    """Bugs: such a model was in no report, and Megatron's nodes route rows that its mask names."""
    rank = distributed.get_rank()
    make_groups(**EXPERTS_OF_ALL)
    steps, eager = trained_eager(rank, number, engine)
    graphed = train(rig.graph_config(cuda_graph_modules=scopes), steps, engine=engine, **{OVERLAP: True})
    assert_same_bits(eager, graphed)
    are_misfits = sum(micro.lengths == parallel_jobs.MISFIT for micros in steps for micro in micros)
    misfits = {"TOO_MANY_SEQUENCES": are_misfits * CALLS} if rank == 1 else {}
    evaluated = 2 * COUNTS[0] * CALLS
    calls = sum(map(len, steps)) * CALLS + evaluated - sum(misfits.values())
    warm_up = 2 * COUNTS[0] * CALLS  # a step of each kind
    assert eager.report["eager"] == {"DISABLED": calls, **misfits}
    rig.ran(graphed.report, calls - warm_up, WARMING_UP=warm_up, **misfits)
    assert eager.report["failures"] == graphed.report["failures"] == []


# Of two ranks: what they share beside the experts, of the model and of DDP.
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Micro]]] = {
    "experts alone": ({}, {}, Micro),
    "rows": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}, Micro),
    "packs": ({"context_parallel_size": 2}, {}, SharedMicro),
    "gradients": ({}, REDUCES, Micro),
    "parameters": ({}, {**REDUCES, "use_distributed_optimizer": True, "overlap_param_gather": True}, Micro),
}


@pytest.mark.parametrize(
    ("what", "delays", "engine"),
    [
        *((what, "", False) for what in ("rows", "packs", "parameters")),
        ("parameters", "unfused", False),
        *(
            pytest.param(what, delays, True, marks=[*ON_GPU, rig.needs_engine])
            for what in ("experts alone", "gradients", "parameters")
            for delays in ("fused", "unfused")
        ),
    ],
)
@on_ranks(2)
def test_ranks_that_share_more_than_experts(what: str, delays: str, engine: bool) -> None:
    """And make late gradients, one micro-batch of which fits no capacity."""
    config, ddp, kind = SHARED[what]
    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **config}
    make_groups(**{name: size for name, size in sizes.items() if name.endswith("_size")})
    own = 0 if config else distributed.get_rank()
    steps = [
        [kind(lengths=(4 * (1 + (index + it + own) % 4), 8), seed=10 * index + it) for it in range(count)]
        for index, count in enumerate(COUNTS)
    ]
    misfits = {"TOO_MANY_SEQUENCES": CALLS} if delays else {}
    if delays:
        steps[2][1] = Micro(lengths=parallel_jobs.MISFIT, seed=own)
    given = {"steps": steps, "make": seeded(OverlapTrainer), "ddp": ddp, "engine": engine}
    train = partial(rig.train, **given, **sizes)
    plugin = partial(rig.graph_config, cuda_graph_modules=("attn", "moe_router"))
    without = train(plugin(mode="eager"), delays=delays and f"{delays} at once")
    for mode in ("eager", "graph"):
        overlapped = train(plugin(mode=mode), delays=delays, **{OVERLAP: True})
        assert_same_bits(without, overlapped, mode)
    rig.ran(overlapped.report, WARMING_UP=COUNTS[0] * CALLS, **misfits)


@pytest.mark.parametrize("delays", ["", "fused", "unfused"])
@on_ranks(2)
def test_a_rank_that_ends_a_step_eager_reduces_in_the_order_of_one_that_replays(delays: str) -> None:
    """Bugs: late gradients were told of in the order of modules, and with them those that come at once."""
    make_groups(**EXPERTS_OF_ALL)
    steps = [[Micro(lengths=(9, 8 + it)) for it in range(2)] for _ in range(2)]
    if distributed.get_rank() == 1:
        steps[-1][-1] = Micro(lengths=parallel_jobs.MISFIT)
    reduced, start = list[Any](), _ParamAndGradBucketGroup.start_grad_sync

    def noted(bucket: Any, **how: Any) -> None:
        reduced.extend(param.shape for param in bucket.params)  # one
        start(bucket, **how)

    given = {"ddp": {**REDUCES, "bucket_size": 1}, "delays": delays, OVERLAP: True, **moe_rig.SHARED}
    train = partial(rig.train, steps=steps, make=seeded(OverlapTrainer), **given, **EXPERTS_OF_ALL)
    with mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", noted):
        eager, expected = train(rig.graph_config(mode="eager")), [*reduced]
        for scopes in (("attn",), SCOPES[2]):
            reduced.clear()
            assert_same_bits(eager, train(rig.graph_config(cuda_graph_modules=scopes)))
            assert reduced == expected != []


@pytest.fixture
def trainer(install: rig.Install, experts: None) -> Any:
    """A model whose schedule makes plans, though its experts are on one rank."""
    install()
    return OverlapTrainer(overlaps=True)


def ask_for_plan(trainer: Any, hold: Callable[[], Any], **further: Any) -> None:
    """A step that asks for the plan of a micro-batch without its pack, while it holds something."""

    def forward_step(*args: Any, **options: Any) -> None:
        held = hold()
        tokens, labels, _mask, positions = (rows[None] for rows in rig.ONE.row_lists())
        lists = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        trainer.chunk.build_schedule_plan(**{"attention_mask": None, **lists, **further})
        raise InterruptedError(held)

    rig.run_schedule(trainer.model, forward_step, [], 1)


def test_a_plan_without_a_pack_is_counted_where_none_was_made_for_it(trainer: Any) -> None:
    """A pack is of other rows, or gone; or a mask stands for it. One that no schedule ends runs as given."""
    make, kept = partial(rig.ONE.params, trainer.device), list[Any]()
    with pytest.raises(ValueError, match="expected packed_seq_params"):
        ask_for_plan(trainer, lambda: kept.append(make()))
    for hold, mask in (
        (lambda: kept, None),
        (lambda: rig.TWO.params(trainer.device), None),
        (lambda: bool(make()), None),
        (make, torch.ones(1)),
    ):
        with pytest.raises(InterruptedError):
            ask_for_plan(trainer, hold, attention_mask=mask)
    trainer.chunk.build_schedule_plan(**rig.ONE.given(trainer.device))
    assert rig.report_of(trainer)["eager"] == {"NO_PACK_METADATA": 4 * CALLS, "EXPERT_OVERLAP": CALLS}


def test_another_model_runs_on_a_canonical_pack_inside_of_the_step(trainer: Any) -> None:
    """Bug: what a pack's class takes was asked of the function that stood in for its constructor."""
    run_other = partial(torch.no_grad()(rig.forward), ExpertTrainer().model, rig.ONE, trainer.device)
    with pytest.raises(InterruptedError, match="True"):
        ask_for_plan(trainer, lambda: bool(run_other()) and packs_have("cu_seqlens_q"))


# Kinds of layers, of Megatron's config and of ours, and what overlap is refused with.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("EE", {}, {"cuda_graph_granularity": "chunk"}, "cuda_graph_granularity"),
    ("EE", {}, {"cp_sizes": (1, 2)}, "cp_sizes"),
    ("E-", {}, {}, "a dense layer as the last, behind which"),
    ("EE", {"mtp_num_layers": 1}, {}, "multi-token prediction (mtp_num_layers=1)"),
    ("EE", {"moe_pad_expert_input_to_capacity": True}, {}, "experts that are padded"),
    ("EE", {"expert_model_parallel_size": 4}, {}, "one expert a rank"),
]


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(("make", "config", "of_plugin", "said"), REFUSED)
def test_what_plans_do_otherwise_is_refused_by_name(
    make: str, config: dict[str, Any], of_plugin: dict[str, Any], said: str, monkeypatch: Any
) -> None:
    chunk = ExpertTrainer(make).chunk
    of, options = partial(refusal_of, chunk, None, ("attn",)), rig.graph_config(**of_plugin)
    for option, value in {OVERLAP: True, **config}.items():
        assert (of() is None) or make == "E-"
        monkeypatch.setattr(chunk.config, option, value)
    if "expert_model_parallel_size" in config and not plans_free_what_one_expert_reads():
        assert of() is None
    else:
        refusal = of(options)
        assert refusal is not None and refusal.sentence.startswith(f"expert-parallel overlap with {said}")
