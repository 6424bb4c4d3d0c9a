# SPDX-License-Identifier: Apache-2.0
"""What of layers of experts is in graphs: their routers, rows permuted to experts too, or all of padded ones.
Routers that are told what to choose are eager, on the rows that were given. Bits: test_model_bits.py."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_rig import Install, Pair, forget_metrics, graph_config, report_of, step, steps_of, train
from moe_rig import ATTENTION, EXPERTS, PADS, PERMUTATION, ROUTERS, ExpertTrainer
from moe_rig import GROUPED_EXPERTS as GROUPED
from same_bits import assert_same_bits
from test_hybrid_model import prediction
from torch import Tensor

import megagraph
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
TOPK = 2
WHY = "its router may be told what to choose, of which a graph would not hear; name 'attn' alone"
ACTIONS = ("RECORD", "REPLAY_FORWARD", None)
FULL = rig.Micro(lengths=(20, 14, 30), seed=3)
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
    """Dispatchers keep nothing of a capture."""
    pair = Pair(ExpertTrainer, plugin={"cuda_graph_modules": scopes}, **PADS)
    for trainer in pair.both:
        trainer.chunk.decoder.__class__ = OwnBlock
    rig.ran(pair.train(steps_of(3, tails=False)), WARMING_UP=2 * 3 * 2)
    for layer in pair.graphed.chunk.decoder.layers if scopes == WHOLE else ():
        # Tensors of a capture would take their memory out of the slot's pool.
        dispatcher = layer.mlp.token_dispatcher
        assert dispatcher.probs is None and dispatcher.routing_map is None


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


def test_an_error_lets_go_of_what_overlapped_shared_experts_hold(trained: Any) -> None:
    trainer = trained(BOTH, **{**moe_rig.OVERLAPPED, **moe_rig.GATED})
    with mock.patch(moe_rig.PLACES["dispatch"], moe_rig.lose), pytest.raises(OSError, match="lost"):
        step(trainer, steps_of(3)[2])
    assert moe_rig.tensors_of_calls(trainer) == []


def test_losses_that_nobody_reads_keep_no_slot(trained: Any) -> None:
    """Bug: with attention alone in graphs Megatron's dispatcher kept what led to the slot."""
    trainer = trained(("attn",))
    for parameter in trainer.chunk.parameters():
        parameter.grad = None
    before = rig.report_of(trainer)
    for micro in itertools.chain.from_iterable(steps_of(3)):
        rig.forward(trainer.chunk, micro, trainer.device)
    assert rig.eager_since(rig.report_of(trainer), before) == {}


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
    part = "attn" if "recompute" in words else "moe_router"  # which has graphs then
    assert words in report["failures"][0] and f"or name '{part}'" in report["failures"][0]


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
def test_what_cannot_be_permuted_in_a_graph_is_refused_by_name(changes: Any, change: Any, said: str) -> None:
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
        pack = dataclasses.replace(moe_rig.PACK, tail=tail, tail_token=index)
        left = rig.step(trainer, [pack], update=False)
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
    ("way", "place", "changes"),
    [
        *((ROUTERS, place, {}) for place in ("dispatch", "combine")),
        *((PERMUTATION, place, PADS) for place in ("dispatch", "experts")),
    ],
)
def test_an_error_leaves_the_next_step_right(way: str, place: str, changes: moe_rig.Config) -> None:
    changes = {**moe_rig.BIAS, **changes}
    pair = rig.Pair(ExpertTrainer, plugin={"cuda_graph_modules": moe_rig.WAYS[way].scopes}, **changes)
    first, second, lost, *others = rig.steps_of(5)
    pair.train([first, second])
    for trainer in pair.both:
        with mock.patch(moe_rig.PLACES[place], moe_rig.lose), pytest.raises(OSError, match="lost"):
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


# -- routers that are told what to choose ---------------------------------------------------------


def targets(micro: rig.Micro, layer: int) -> Tensor:
    """Two experts for each row that a pack has, int64 [rows, 2]."""
    generator = torch.Generator().manual_seed(100 * micro.seed + layer)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(micro.physical)])


class Told(list[rig.Micro]):
    """Micro-batches, before each of which core's routers are told what to do with it."""

    @contextmanager
    def telling(self, trainer: ExpertTrainer) -> Iterator[None]:
        self.recorded: list[Tensor] = []
        modules, self._device = trainer.chunk.modules(), trainer.device
        self._replays: list[Any] = [it.router_replay for it in modules if hasattr(it, "router_replay")]
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


def run(config: Any, given: Sequence[Sequence[rig.Micro]], **changes: Any) -> tuple[rig.Run, list[Tensor]]:
    """Trains a fresh model whose routers record and replay. Returns what they have recorded, too."""
    steps = [Told(micros) for micros in given]
    how = {"moe_enable_routing_replay": True, "around": lambda trainer, index: steps[index].telling(trainer)}
    found = rig.train(config, steps, **{"make": ExpertTrainer, **how, **changes})
    return found, [each for told in steps for each in told.recorded]


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "attention": (("attn",), {}),
    "allgather, bias": (("attn",), {**moe_rig.GATHERS, **moe_rig.BIAS}),
    "jitter, drop": (("attn",), {**moe_rig.CASES["jitter"], **moe_rig.DROPS}),
    "moe_router": (("attn", "moe_router"), {}),
    "moe": (("attn", "moe"), moe_rig.PADS),
    "prediction": (("attn",), {"make": prediction, "kinds": "EE"}),
}


@pytest.mark.parametrize(
    ("case", "masks"),
    [
        *((case, False) for case in CASES if case != "prediction"),
        *(("attention", True), pytest.param("prediction", False, marks=pytest.mark.both)),
    ],
)
def test_bits_beside_routers_that_are_told(case: str, masks: bool) -> None:
    """Three packs a step, each with other actions and targets. Routers see the rows that were given."""
    (scopes, changes), layers = CASES[case], 4 if case == "prediction" else 2
    given = rig.steps_of(13 if rig.ON_GPU else 3, masks=masks)
    eager = run(rig.graph_config(mode="eager"), given, **changes)
    graphed = run(rig.graph_config(cuda_graph_modules=scopes), given, **changes)
    assert_same_bits(eager, graphed)
    rows = [m.physical for ms in given for i, m in enumerate(ms) if ACTIONS[(m.seed + i) % 3] == "RECORD"]
    assert [tuple(each.shape) for each in graphed[1]] == [(n, TOPK) for n in rows for _layer in range(layers)]
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
    assert_same_bits(alone[1], graphed[1])
    for one, other in zip(alone[0].steps, graphed[0].steps, strict=True):
        torch.testing.assert_close(one.losses, other.losses)
        torch.testing.assert_close(one.grads, other.grads, atol=1e-5, rtol=1e-3)


def host_routing(seen: list[tuple[int, Tensor | None]]) -> AbstractContextManager[Any]:
    """As verl's in place of `TopKRouter.routing`; notes the rows and the mask of each call."""

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
