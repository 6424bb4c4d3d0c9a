# SPDX-License-Identifier: Apache-2.0
"""Layers of experts in each way that they are graphed: the bits of mode `eager`, in all a step leaves."""

import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import moe_rig
import pytest
import torch
from context_models import LatentExpertTrainer
from megatron_rig import ON_GPU, Install, Pair, Run, compare_runs, metrics, report_of, step, steps_of
from moe_rig import PACK, PLACES, TAILS, ExpertTrainer
from same_bits import assert_same_bits

pytestmark = [
    pytest.mark.usefixtures("experts"),
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    # Of torch's compiler, which Megatron's fused activations run through on a GPU.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS = 8 if ON_GPU else 3
EAGER: dict[str, tuple[Run, Any]] = {}  # what each way is compared with
WARM_UP = {"WARMING_UP": 3 * 2}


class Way(NamedTuple):
    """A way to graph layers of experts: what is named, the models, and whether their experts are grouped."""

    scopes: str | tuple[str, ...]
    cases: dict[str, dict[str, Any]]
    is_grouped: bool = False


ATTENTION, ROUTERS, PERMUTATION = "attention", "attention, routers", "attention, routers, permutation"
PADDED, GROUPED = "padded experts", "grouped experts"
WAYS = {
    ATTENTION: Way("attn", moe_rig.CASES),
    ROUTERS: Way(("attn", "moe_router"), moe_rig.ROUTED),
    PERMUTATION: Way(("attn", "moe_router", "moe_preprocess"), moe_rig.PERMUTED),
    PADDED: Way(("attn", "moe"), moe_rig.PADDED),
    GROUPED: Way((), {**moe_rig.GROUPED, **moe_rig.GROUPED_ON_GPU}, is_grouped=True),
}
BIASED = "sigmoid, bias, groups"


def of(way: str, case: str) -> dict[str, Any]:
    """The config of a case, unless this release has no such graphs."""
    found = WAYS[way].cases[case]
    if way == PERMUTATION and not moe_rig.can_permute(found):
        pytest.skip("this release permutes into shapes that only the device knows")
    return found


def spec_of(way: str, kinds: str = "EE") -> Any:
    return moe_rig.grouped_spec(kinds) if WAYS[way].is_grouped else None


def compare(
    way: str, steps: int, kinds: str = "EE", *, scopes: Any = None, masks: bool = False, **changes: Any
) -> dict[str, Any]:
    """Trains eager and in this way, with the same bits. Returns the report of the graphs."""
    scopes = WAYS[way].scopes if scopes is None else scopes
    changes |= {"spec": spec_of(way, kinds), "shared": EAGER}
    return moe_rig.compare(kinds, steps_of(steps, masks=masks), scopes, **changes)


@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(way, case, marks=[pytest.mark.gpu] if case in moe_rig.GROUPED_ON_GPU else [])
        for way, (_, cases, _) in WAYS.items()
        for case in cases
    ],
)
def test_bits(way: str, case: str) -> None:
    report = compare(way, STEPS, **of(way, case))
    assert report["failures"] == [] and report["eager"] == WARM_UP
    assert report["calls"] == STEPS * 3 * 2 and report["replays"] == (STEPS - 1) * 3 * 2
    assert report["verification"]["verified"] == 1 and report["verification"]["unverified"] == 0
    assert report["layers"] == 2 and report["graphs"] == 2 * 2


MASKED = [(way, case) for way in (ATTENTION, ROUTERS) for case in ("alltoall", "drop", BIASED)]


@pytest.mark.parametrize(("way", "case"), [*MASKED, (GROUPED, "top 2"), (GROUPED, BIASED)])
def test_masks_of_the_users_too(way: str, case: str) -> None:
    report = compare(way, STEPS, masks=True, **of(way, case))
    assert report["failures"] == [] and report["eager"] == WARM_UP


REDUCED = [(way, BIASED, 4000) for way in (ATTENTION, PADDED, GROUPED)]
REDUCED += [
    (ROUTERS, case, size)
    for case in ("shared experts", "shared experts, overlapped")
    for size in (1000, 4000)
]


@pytest.mark.parametrize(("way", "case", "bucket_size"), REDUCED)
def test_gradients_that_are_reduced_while_the_backward_runs(way: str, case: str, bucket_size: int) -> None:
    """Bug that was: overlapped shared experts are no part of the graph, which reported their gradients."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": bucket_size}
    report = compare(way, STEPS, ddp=ddp, **{**of(way, BIASED), **of(way, case)})
    assert report["failures"] == [] and report["eager"] == WARM_UP


# Ways, what is named, and sites of two layers of experts and two dense ones.
MIXED: list[tuple[str, str, Any, int]] = [
    (ROUTERS, "gated shared experts, allgather", ("attn", "moe_router"), 4),
    (ROUTERS, "gated shared experts, allgather", ("attn", "moe_router", "mlp"), 4),
    (ROUTERS, "gated shared experts, allgather", "moe_router", 2),
    (ROUTERS, "gated shared experts, allgather", ("mlp", "moe_router"), 4),
    (PERMUTATION, "shared experts", ("mlp", "moe_router", "moe_preprocess"), 4),
    (PERMUTATION, "drop and pad", ("mlp", "moe_router", "moe_preprocess"), 4),
    (PADDED, BIASED, ("attn", "moe"), 4),
    (PADDED, BIASED, ("attn", "moe", "mlp"), 4),
    (PADDED, BIASED, "moe", 2),
    (GROUPED, "shared experts", (), 4),
    (GROUPED, "shared experts", "moe", 2),
    (GROUPED, "shared experts", ("attn", "mlp", "moe"), 4),
    (GROUPED, "shared experts", ("mlp", "moe"), 4),
    (GROUPED, "shared experts", "attn", 4),
    (GROUPED, "shared experts", ("attn", "moe_router"), 4),
]


@pytest.mark.parametrize(("way", "case", "scopes", "sites"), MIXED, ids=str)
def test_dense_layers_among_layers_of_experts(way: str, case: str, scopes: Any, sites: int) -> None:
    report = compare(way, STEPS, "E-E-", scopes=scopes, **of(way, case))
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * sites}
    assert report["layers"] == sites and report["graphs"] == 2 * sites


@pytest.mark.parametrize("way", [ATTENTION, ROUTERS])
def test_evaluation_between_steps_records_and_counts_nothing(install: Install, way: str) -> None:
    install(cuda_graph_modules=WAYS[way].scopes)
    pair = Pair(ExpertTrainer, **of(way, BIASED))
    for micros in steps_of(4):
        pair.step(*micros)
        pair.evaluate(*micros)
        counts = [router.local_tokens_per_expert for it in pair.both for router in moe_rig.routers(it)]
        assert not any(each.any() for each in (*counts, *metrics().values()))
    assert pair.report()["eager"] == {"WARMING_UP": 2 * 3 * 2}


@pytest.mark.parametrize(
    ("way", "case"),
    [(PERMUTATION, BIASED), (PERMUTATION, "shared experts"), (PERMUTATION, "drop and pad"), (PADDED, BIASED)],
)
def test_evaluation_between_and_a_longer_tail(install: Install, way: str, case: str) -> None:
    install(cuda_graph_modules=WAYS[way].scopes)
    pair = Pair(ExpertTrainer, **of(way, case))
    for index, tail in enumerate(TAILS):
        micro = dataclasses.replace(PACK, tail=tail, tail_token=index)
        pair.step(micro, PACK)
        pair.evaluate(PACK, micro)
    assert pair.report()["eager"] == {"WARMING_UP": 2 * 2 * 2}


TAILED = ("alltoall", "allgather", "drop", "drop and pad", BIASED)


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize(("way", "case"), [*((ROUTERS, case) for case in TAILED), (GROUPED, BIASED)])
def test_a_longer_tail_changes_nothing(install: Install, way: str, case: str, mode: str) -> None:
    """Routers that stay eager: test_moe.py."""
    install(mode=mode, cuda_graph_modules=WAYS[way].scopes)
    trainer = ExpertTrainer(spec=spec_of(way), **{**of(way, case), "moe_router_bias_update_rate": 0.0})
    step(trainer, [PACK], update=False)
    end, found = sum(PACK.lengths), []
    for index, tail in enumerate(TAILS):
        left = step(trainer, [dataclasses.replace(PACK, tail=tail, tail_token=index)], update=False)
        assert all(int(counts.sum()) == 2 * end for counts in left.counts)
        left.losses[:] = [each[:end] for each in left.losses]
        found.append(left)
    if way == ROUTERS or not torch.cuda.is_available():  # where another kernel multiplies other rows
        for other in found[1:]:
            assert_same_bits(found[0], other)
    assert report_of(trainer)["replays"] == 2 * len(TAILS) * (mode == "graph")


@pytest.mark.parametrize("way", [ATTENTION, ROUTERS, PERMUTATION])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_leaves_the_next_step_right(install: Install, way: str, place: str) -> None:
    install(cuda_graph_modules=WAYS[way].scopes)
    case = {**WAYS[way].cases[BIASED], **(of(way, "drop and pad") if way == PERMUTATION else {})}
    pair = Pair(ExpertTrainer, **case)
    first, second, lost, *others = steps_of(5)
    pair.train([first, second])
    for trainer in pair.both:
        where = f"megatron.core.transformer.moe.{PLACES[place]}"
        with mock.patch(where, moe_rig.lose), pytest.raises(OSError, match="lost"):
            step(trainer, lost, eager=trainer is pair.eager)
        assert trainer is pair.eager or way == ATTENTION or not moe_rig.tensors_of_calls(trainer)
        metrics()
        for router in moe_rig.routers(trainer) if way != ATTENTION else ():
            router.local_tokens_per_expert.zero_()
    # Nothing of the step that raised is kept by the dispatcher, so that no slot is.
    report = pair.train(others)
    assert report["eager"] == WARM_UP and report["replays"] == 3 * 3 * 2 + 1


# What is named, and the sites of a layer with experts and a dense one.
LATENT: list[tuple[tuple[str, ...], int, str]] = [
    (("attn",), 2, "plain, RoPE"),
    (("moe_router",), 1, "plain, RoPE"),
    (("attn", "moe_router"), 2, "plain, RoPE"),
    (("attn", "mlp", "moe_router"), 2, "plain, RoPE"),
    (("mlp",), 1, "plain, RoPE"),
    (("attn", "moe_router"), 2, "low rank, YaRN"),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("scopes", "sites", "kind"), LATENT, ids=str)
def test_layers_of_multi_latent_attention(scopes: tuple[str, ...], sites: int, kind: str) -> None:
    changes = {**moe_rig.BIAS, **moe_rig.CASES["shared experts"]}
    plugin = {"cuda_graph_modules": scopes}
    report = compare_runs(steps_of(STEPS), LatentExpertTrainer, plugin, kind=kind, **changes).report
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * sites}
    assert report["replays"] == (STEPS - 1) * 3 * sites
