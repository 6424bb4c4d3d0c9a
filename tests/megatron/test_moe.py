# SPDX-License-Identifier: Apache-2.0
"""What of layers of experts is in graphs: their routers, rows permuted to experts too, or all of padded ones.
Bits: test_model_bits.py."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import pytest
import torch
from host_rig import OwnBlock
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron_rig import Install, Pair, forget_metrics, graph_config, report_of, step, steps_of, train
from moe_rig import ATTENTION, PADS, PERMUTATION, ROUTERS, ExpertTrainer
from moe_rig import GROUPED_EXPERTS as GROUPED
from same_bits import assert_same_bits

from megagraph.megatron import seams
from megagraph.megatron.scopes.moe import MOE, PREPROCESS

pytestmark = [
    pytest.mark.usefixtures("experts"),
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

BOTH, WHOLE = ("attn", "moe_router"), ("attn", "moe")
ALL = (*BOTH, "moe_preprocess")
# As of one stage of a pipeline whose dense layers lie in another.
ELSEWHERE = {**moe_rig.CASES["drop"], "moe_layer_freq": [0, 1]}
TAILED = ("alltoall", "allgather", "drop", "drop and pad", moe_rig.BIASED)


@pytest.fixture
def trained(install: Install) -> Any:
    def train(scopes: Sequence[str], steps: int = 2, tails: bool = True, **changes: Any) -> ExpertTrainer:
        install(cuda_graph_modules=scopes)
        trainer = ExpertTrainer(**changes)
        for micros in steps_of(steps, tails=tails):
            step(trainer, micros)
        return trainer

    return train


def test_layers_without_a_norm_before_their_experts() -> None:
    """What enters a router alone is then what leaves it, too."""
    pair = Pair(ExpertTrainer, plugin={"cuda_graph_modules": "moe_router"}, **moe_rig.SHARED)
    for trainer in pair.both:
        for layer in trainer.chunk.decoder.layers:
            layer.pre_mlp_layernorm = IdentityOp()
    assert pair.train(steps_of(3))["eager"] == {"WARMING_UP": 3 * 2}


@pytest.mark.parametrize("scopes", [("moe_router", "moe_preprocess"), WHOLE], ids=str)
def test_a_block_that_runs_its_layers_itself(scopes: Sequence[str]) -> None:
    pair = Pair(ExpertTrainer, plugin={"cuda_graph_modules": scopes}, **PADS)
    for trainer in pair.both:
        trainer.chunk.decoder.__class__ = OwnBlock
    rig.ran(pair.train(steps_of(3, tails=False)), WARMING_UP=2 * 3 * 2)


def _replace_scale(device: torch.device, scale: float | None) -> None:
    scales = None if scale is None else torch.full((1,), scale, device=device)
    MoEAuxLossAutoScaler.main_loss_backward_scale = scales


REPLACED: dict[str, tuple[Sequence[str], Any, moe_rig.Config]] = {
    # Graphs would go on adding to tensors that nobody reads.
    "metrics": (BOTH, lambda device: forget_metrics(), moe_rig.CASES["several losses"]),
    "metrics of whole layers": (WHOLE, lambda device: forget_metrics(), {**moe_rig.BIAS, **PADS}),
    # Bug that was: where there was no scale, a capture's warm-up made one that no schedule could set.
    "no scale of losses": (BOTH, partial(_replace_scale, scale=None), {}),
    "a scale of losses": (BOTH, partial(_replace_scale, scale=3.0), {}),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_is_replaced_between_steps_is_noticed(what: str) -> None:
    scopes, replace, changes = REPLACED[what]
    pair = Pair(ExpertTrainer, plugin={"cuda_graph_modules": scopes}, **changes)
    for index, (micro, *_others) in enumerate(steps_of(5)):
        if index not in (2, 3):
            pair.step(micro)
            continue
        left = []
        for trainer in pair.both:
            replace(trainer.device)
            left.append(step(trainer, [micro], eager=trainer is pair.eager))
        assert_same_bits(*left)
    eager = pair.report()["eager"]
    assert eager["ADDRESS_MOVED"] >= 2 and eager["WARMING_UP"] == 2
    assert set(eager) == {"ADDRESS_MOVED", "WARMING_UP"}


def test_metrics_that_are_watched_keep_their_memory(trained: Any) -> None:
    """Bug that might be: new metrics lie where others were, and graphs add to what has another name."""
    trainer = trained(BOTH, **moe_rig.CASES["several losses"])
    before = {values.data_ptr() for values in seams.moe_metrics().values()}
    forget_metrics()
    step(trainer, steps_of(1)[0], eager=True)
    assert before.isdisjoint(values.data_ptr() for values in seams.moe_metrics().values())


def test_a_dispatcher_keeps_nothing_of_a_capture(trained: Any) -> None:
    """Its tensors would take their memory out of the slot's pool."""
    for layer in trained(WHOLE, **PADS).chunk.decoder.layers:
        dispatcher = layer.mlp.token_dispatcher
        assert dispatcher.probs is None and dispatcher.routing_map is None


def test_a_permutation_of_somebody_elses_is_an_error(trained: Any) -> None:
    """It would permute what stands for the rows in the eager part, where nobody reads it."""
    trainer = trained(ALL, **PADS)
    ours: Any = token_dispatcher.permute
    with (
        mock.patch.object(token_dispatcher, "permute", ours.__wrapped__),
        pytest.raises(RuntimeError, match="has permuted rows by another function than Megatron's"),
    ):
        step(trainer, steps_of(1)[0])


@pytest.mark.skipif(seams.permutation_sorts(), reason="this release sorts")
def test_a_release_that_permutes_by_a_mask_is_named(trained: Any) -> None:
    report = rig.ran(report_of(trained(ALL, 3, tails=False)), failures=1, SCOPE_UNSUPPORTED=3 * 3 * 2)
    assert "this release of megatron-core permutes into shapes that only the" in report["failures"][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher 'allgather' counts rows on the host"),
        (moe_rig.OVERLAPPED, "moe_shared_expert_overlap=True is not supported yet"),
        (moe_rig.recompute("moe"), "'moe' in recompute_modules is not supported yet"),
    ],
)
def test_what_waits_or_forks_is_refused_by_name(trained: Any, changes: moe_rig.Config, words: str) -> None:
    trainer = trained(WHOLE, tails=False, **{**PADS, **changes})
    assert words in str(MOE.check(trainer.chunk.decoder.layers[0]))
    report = rig.ran(report_of(trainer), failures=1, SCOPE_UNSUPPORTED=2 * 3 * 2)
    assert words in report["failures"][0] and "or name 'moe_router'" in report["failures"][0]


UNBUILT = {"moe_permute_fusion": True, "moe_latent_size": 16, "moe_router_padding_for_quantization": True}
# Of a layer: further options, what is done to it, and what is said of it.
REFUSED: list[tuple[moe_rig.Config, Callable[[Any], Any], str]] = [
    *(
        ({}, lambda it, given=it: setattr(it.config, *given), "{}={!r} is not supported yet".format(*it))
        for it in UNBUILT.items()
    ),
    # Normed hidden states and the residual are one tensor there, whose gradients eager sums in its order.
    (
        moe_rig.OVERLAPPED,
        lambda layer: setattr(layer, "pre_mlp_layernorm", IdentityOp()),
        "without a norm before them are not supported yet",
    ),
    (
        *({}, lambda layer: setattr(layer.mlp.token_dispatcher, "dispatch_preprocess", moe_rig.lose)),
        "dispatch_preprocess is not Megatron's",
    ),
]


@pytest.mark.parametrize(("changes", "change", "said"), REFUSED)
def test_what_cannot_be_permuted_in_a_graph_is_refused_by_name(
    changes: moe_rig.Config, change: Callable[[Any], Any], said: str
) -> None:
    layer = ExpertTrainer(**PADS, **changes).chunk.decoder.layers[0]
    assert PREPROCESS.check(layer) is None
    change(layer)
    assert said in str(PREPROCESS.check(layer))


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_model_of_which_nothing_can_be_graphed_has_the_bits_of_an_unpatched_one(mode: str) -> None:
    """Bug: what it ran before a capture, and in mode `eager` always, were canonical packs."""
    given = rig.steps_of(2, tails=False)
    ours = rig.train(rig.graph_config(cuda_graph_modules="mlp", mode=mode), given, ExpertTrainer, **ELSEWHERE)
    assert_same_bits(ours, rig.train(None, given, ExpertTrainer, **ELSEWHERE))
    assert rig.ran(ours.report, failures=1, SCOPE_UNSUPPORTED=2 * 3 * 2)["failures"] == [
        "GPTModel stays eager (SCOPE_UNSUPPORTED): no layer of it can be graphed; layer 0 "
        "(TransformerLayer): it has nothing that mlp would graph"
    ]


@pytest.mark.parametrize(
    ("mode", "way", "case"),
    [
        *(("eager", ATTENTION, case) for case in TAILED),
        *(("graph", ROUTERS, case) for case in TAILED),
        *(("graph", ATTENTION, case) for case in ("drop", moe_rig.BIASED)),
        *((mode, GROUPED, moe_rig.BIASED) for mode in ("eager", "graph")),
    ],
)
def test_a_longer_tail_changes_nothing(install: rig.Install, way: str, case: str, mode: str) -> None:
    install(mode=mode, cuda_graph_modules=moe_rig.WAYS[way].scopes)
    changes = {**moe_rig.WAYS[way].cases[case], "moe_router_bias_update_rate": 0.0}
    trainer = ExpertTrainer(is_grouped=way == GROUPED, **changes)
    rig.step(trainer, [moe_rig.PACK], update=False)
    end, found = sum(moe_rig.PACK.lengths), []
    for index, tail in enumerate(moe_rig.TAILS):
        left = rig.step(
            trainer, [dataclasses.replace(moe_rig.PACK, tail=tail, tail_token=index)], update=False
        )
        left.losses[:] = [each[:end] for each in left.losses]
        if way == ATTENTION and rig.ON_GPU:  # where the output layer takes another kernel for other rows
            left.losses, left.grads = [], {}
        assert all(int(counts.sum()) == 2 * end for counts in left.counts)
        found.append(left)
    if way != GROUPED or not rig.ON_GPU:  # where another kernel multiplies other rows
        for other in found[1:]:
            assert_same_bits(found[0], other)
    assert rig.report_of(trainer)["replays"] == 2 * len(moe_rig.TAILS) * (mode == "graph")


@pytest.mark.skipif(torch.cuda.is_available(), reason="in bfloat16 a rounding routes a token elsewhere")
@pytest.mark.parametrize("case", ["alltoall", "allgather", "shared experts", "sigmoid, bias, groups"])
def test_eager_agrees_with_megatron_alone(case: str) -> None:
    """Which takes no tail. Sums of losses have other roundings with a mask."""
    steps = rig.steps_of(1, tails=False)
    ours = rig.train(rig.graph_config(mode="eager"), steps, ExpertTrainer, **moe_rig.CASES[case])
    one, other = ours.steps[0], rig.train(None, steps, ExpertTrainer, **moe_rig.CASES[case]).steps[0]
    for name in ("losses", "grads", "metrics"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-6)
    assert [int(each.sum()) for each in one.counts] == [int(each.sum()) for each in other.counts]


def test_a_model_that_is_refused_keeps_megatrons_routing() -> None:
    """Masked rows are routed there; Megatron's own count of them for a bias raises, here it does not."""
    changes = {**moe_rig.DROPS, **moe_rig.FULL_RECOMPUTE}
    steps = rig.steps_of(2, masks=True, tails=False)
    ours = rig.train(rig.graph_config(cuda_graph_modules="attn"), steps, ExpertTrainer, **changes)
    assert_same_bits(ours, rig.train(None, steps, ExpertTrainer, **changes))
    assert set(ours.report["eager"]) == {"RECOMPUTING"}
    with pytest.raises(RuntimeError):
        rig.train(None, steps, ExpertTrainer, **moe_rig.BIAS)
    biased = rig.train(rig.graph_config(), steps, ExpertTrainer, **{**moe_rig.BIAS, **changes})
    assert set(biased.report["eager"]) == {"RECOMPUTING"} and any(biased.steps[0].counts[0])


@pytest.mark.parametrize(
    ("way", "place", "further"),
    [
        *((ROUTERS, place, {}) for place in ("dispatch", "combine")),
        (ROUTERS, "dispatch", {**moe_rig.OVERLAPPED, **moe_rig.GATED}),
        *((PERMUTATION, place, PADS) for place in ("dispatch", "experts")),
    ],
)
def test_an_error_leaves_the_next_step_right(way: str, place: str, further: moe_rig.Config) -> None:
    changes = {**moe_rig.BIAS, **further}
    pair = rig.Pair(ExpertTrainer, plugin={"cuda_graph_modules": moe_rig.WAYS[way].scopes}, **changes)
    first, second, lost, *others = rig.steps_of(5)
    pair.train([first, second])
    for trainer in pair.both:
        where = f"megatron.core.transformer.moe.{moe_rig.PLACES[place]}"
        with mock.patch(where, moe_rig.lose), pytest.raises(OSError, match="lost"):
            rig.step(trainer, lost, eager=trainer is pair.eager)
        assert trainer is pair.eager or not moe_rig.tensors_of_calls(trainer)
        rig.metrics()
        for router in trainer.routers():
            router.local_tokens_per_expert.zero_()
    # Nothing of the step that raised is kept by the dispatcher, so that no slot is.
    rig.ran(pair.train(others), 3 * 3 * 2 + 1, WARMING_UP=3 * 2)


@pytest.mark.skipif(
    not hasattr(PackedSeqParams, "tokens_per_sample"), reason="this release has no tokens_per_sample"
)
def test_packs_whose_rows_are_samples_run_as_given() -> None:
    of_samples = partial(dataclasses.replace, tokens_per_sample=moe_rig.PACK.physical // 2)
    given = [[dataclasses.replace(moe_rig.PACK, pack=of_samples)]] * 2
    ours = train(graph_config(cuda_graph_modules="attn"), given, ExpertTrainer)
    assert_same_bits(ours, train(None, given, ExpertTrainer))
    assert ours.report["eager"] == {"SIGNATURE_CHANGED": 2 * 2}
