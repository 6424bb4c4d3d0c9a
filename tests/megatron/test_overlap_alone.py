# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap in one process: two real streams on a GPU. A copy stands for the all-to-all. All is
compared with training without overlap, since eager overlap could be wrong itself."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import overlap_rig
import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron_rig import Micro
from overlap_rig import CALLS, COUNTS, check_calls, compare, in_nodes, raising, steps_of, train, train_eager
from same_bits import BitsDiffer, assert_same_bits
from streams import seed_streams
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import megagraph
from benchmarks.measuring.clocks import PART, Span, Timeline
from benchmarks.subjects import overlap
from benchmarks.subjects.overlap import keep_busy
from benchmarks.subjects.packs import MICRO_BATCHES
from benchmarks.subjects.steps import StepCase, step_case
from megagraph.megatron import seams
from megagraph.megatron.patch import overlap as plans
from megagraph.megatron.scopes.plan import BlockPlan
from megagraph.reasons import EagerReason

pytestmark = [pytest.mark.both, pytest.mark.usefixtures("deterministic_engine")]

BOTH = ("attn", "moe_router")
PERMUTES = (*BOTH, "moe_preprocess")
FEW = 5  # each number of micro-batches behind each other one
STEPS = 9 if rig.ON_GPU else FEW  # more than twice all of them, where streams race
BREAKS = 2  # of these the one that raises, or before which something changes
ON_GPU = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # Transformer Engine's own, of every kind
engines = pytest.mark.parametrize(
    "engine", [False, pytest.param(True, marks=[*ON_GPU, rig.needs_engine])], ids=["core", "engine"]
)

needs_sorting = pytest.mark.skipif(not seams.permutation_sorts(), reason="permutes into shapes that vary")
BUSY = ("communication", "compute")
LATE_US = 3000.0  # longer than the host takes to reach the consumer
SOAK = pytest.mark.soak
LONG = [pytest.param(2000, BOTH, marks=SOAK), pytest.param(2000, PERMUTES, marks=[SOAK, needs_sorting])]


@engines
@pytest.mark.parametrize("us", [0, *(pytest.param(us, marks=pytest.mark.gpu) for us in (50, 800))])
@pytest.mark.parametrize("masks", [False, True], ids=["no masks", "masks"])
def test_bits_of_no_overlap(masks: bool, us: float, engine: bool) -> None:
    """Slots become NaN once they are free, as does fresh memory."""
    steps = steps_of(STEPS, masks=masks)
    without = train(steps, "eager", overlaps=False, engine=engine)
    for mode in ("eager", "graph"):
        overlapped = train(steps, mode, us=us, engine=engine, plugin={"poison": True})
        assert_same_bits(without, overlapped, mode)
        check_calls(overlapped.report, mode, sum(map(len, steps)))


@needs_sorting
def test_rows_that_were_dispatched_give_their_memory_back() -> None:
    """Nodes keep all else; and these too, where Megatron's own graphs would have made them."""
    compare(steps_of(STEPS, masks=True), PERMUTES)
    chunk: Any = overlap_rig.OverlapTrainer(overlaps=True).chunk
    for named, transient in ((), [0, 1]), (["moe_preprocess"], []):
        chunk.config.cuda_graph_modules = named
        assert [[*spec.transient] for spec in BlockPlan(chunk.decoder, PERMUTES).specs] == [transient] * CALLS


def sooner(trainer: Any, _index: int) -> contextlib.AbstractContextManager[Any]:
    """Backwards of attention come before the forward of the experts beside them, and not behind it."""
    trainer.chunk.config.ep_overlap_early_attn_memory_release = True  # which asks for overlap beside it
    return contextlib.nullcontext()


# Of other models: what `compare()` is given.
KINDS: dict[str, dict[str, Any]] = {
    **{case: moe_rig.CASES[case] for case in ("shared experts", moe_rig.BIASED, "drop")},
    "attention recomputed": moe_rig.recompute("core_attn"),  # overlap refuses `moe` alone
    "attention whose backward comes sooner": {"around": sooner},
}


@pytest.mark.parametrize(
    ("scopes", "kind", "engine"),
    [
        *((BOTH, kind, False) for kind in KINDS),
        *((("attn",), kind, False) for kind in KINDS if kind.startswith("attention")),
        pytest.param(BOTH, "attention recomputed", True, marks=[*ON_GPU, rig.needs_engine]),
    ],
)
def test_models_of_other_kinds(scopes: tuple[str, ...], kind: str, engine: bool) -> None:
    compare(steps_of(3, fills=False, masks=True), scopes, engine=engine, **KINDS[kind])


@pytest.mark.parametrize("kinds", ["EE", "-E"])
def test_slots_share_dispatched_rows_beside_experts_only_and_a_hosts_forward_is_refused(kinds: str) -> None:
    """A dense layer's backward of attention waits for no reader. A plan would not run such a forward."""
    chunk = overlap_rig.OverlapTrainer(kinds, overlaps=True).chunk
    plan = BlockPlan(chunk.decoder, BOTH)
    assert plan.facing() == ([[0, 1], [2, 1]], kinds == "EE")  # the memory of one slot, and of one layer
    for layer in chunk.decoder.layers:
        layer.forward = partial(layer.forward)
    plan = BlockPlan(chunk.decoder, ("attn",))
    assert plan.why_eager is not None and "does not run its forward" in plan.why_eager[1]


def test_gradients_are_copied_as_often_as_without_overlap() -> None:
    """Beside what Megatron's nodes copy in eager, too."""
    num: dict[tuple[str, bool], int] = {}
    for way in itertools.product(("eager", "graph"), (False, True)):
        seen = profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True)
        train(steps_of(BREAKS + 1), way[0], overlaps=way[1], around=rig.at(BREAKS, lambda _, seen=seen: seen))
        given = [event.input_shapes[0] for event in seen.events() if event.name == "aten::copy_"]
        num[way] = given.count([rig.CAPACITY.tokens, 1, rig.OPTIONS.hidden])
    assert num["graph", True] - num["graph", False] == num["eager", True] - num["eager", False] > 0


@pytest.mark.parametrize("scopes", [(), ("moe_router",)], ids=["as-chosen", "moe_router"])
def test_dense_layers_follow_attention(scopes: tuple[str, ...]) -> None:
    """Bug: the MLP of a dense layer was named as well, which runs in a node of its own."""
    report = compare(steps_of(3, fills=False), scopes, kinds="-E")
    assert report["cuda_graph_modules"] == [*(scopes or BOTH)]
    assert report["layers"] == (1 if scopes else 2)


def test_packs_below_their_capacity_have_its_bits() -> None:
    steps = steps_of(STEPS, fills=False)
    assert_same_bits(*[train(steps, None, overlaps=overlaps) for overlaps in (False, True)])
    assert_same_bits(*(train(steps, mode) for mode in ("eager", "graph")))


def compared_while(act: Callable[[Any], Any], *, also_eager: bool = False) -> dict[str, Any]:
    """Trains eager and graphed, and with something done around the last steps. Returns the graphed report."""
    steps = steps_of(FEW, fills=False, masks=True)

    def around(trainer: Any, index: int) -> contextlib.AbstractContextManager[Any]:
        return act(trainer) if index >= BREAKS else contextlib.nullcontext()

    eager = train_eager(steps, **({"around": around} if also_eager else {}))
    graphed = train(steps, "graph", around=around)
    assert_same_bits(eager, graphed)
    graphed.report["changed"] = sum(map(len, steps[BREAKS:])) * CALLS
    return graphed.report


def test_a_layer_with_a_hook_runs_in_megatrons_node_and_the_other_replays() -> None:
    def hooked(trainer: Any) -> Any:
        attention = trainer.chunk.decoder.layers[1].self_attention
        return attention.register_forward_hook(lambda _module, _given, out: None)

    assert set(compared_while(hooked)["eager"]) == {"WARMING_UP", "FOREIGN_HOOK"}


@pytest.mark.parametrize("is_first", [True, False])
def test_graphs_are_made_anew_where_a_host_begins_or_ends_to_overlap(is_first: bool) -> None:
    """Bug: a backward raised, since a plan held what was transient without it; and one slot was left."""

    def around(trainer: Any, index: int) -> contextlib.AbstractContextManager[Any]:
        trainer.chunk.config.overlap_moe_expert_parallel_comm = (index < BREAKS) == is_first
        return contextlib.nullcontext()

    steps = steps_of(FEW)
    eager, graphed = (train(steps, mode, around=around, **moe_rig.SHARED) for mode in ("eager", "graph"))
    assert_same_bits(eager, graphed)
    changed = len(steps[BREAKS]) * CALLS
    assert graphed.report["eager"] == {"WARMING_UP": COUNTS[0] * CALLS, "PARAMETERS_CHANGED": changed}


def test_another_rotary_table_of_the_models_runs_as_given_until_graphs_are_made_of_it() -> None:
    def scaled(trainer: Any) -> contextlib.AbstractContextManager[Any]:
        rotary = trainer.chunk.rotary_pos_emb
        ask = rotary.forward
        return mock.patch.object(rotary, "forward", lambda *args, **given: 2 * ask(*args, **given))

    report = compared_while(scaled, also_eager=True)
    assert 0 < report["eager"]["SIGNATURE_CHANGED"] < report["changed"]


def test_a_micro_batch_that_replays_nothing_though_it_has_graphs_is_a_failure() -> None:
    @contextlib.contextmanager
    def without_graphs(_trainer: Any) -> Iterator[None]:
        (graphs,) = rig.the_plugin().all_graphs()
        bank = graphs.captures.bank

        def count(_rows: Any) -> Any:
            bank.count_eager(EagerReason.NESTING, calls=1)
            return NotImplemented

        with mock.patch.object(bank, "sites", [count] * CALLS):
            yield

    report = compared_while(without_graphs)
    assert report["failures"] == ["a plan's micro-batch has graphs, and replayed none"]
    assert report["eager"]["NESTING"] == report["changed"]


def test_a_forward_ahead_of_the_backward_that_frees_its_memory_runs_eager() -> None:
    """Two slots share memory, as Megatron runs layer by layer through two micro-batches."""
    run = TransformerModelChunkSchedulePlan.run

    def one_after_another(forward: Any, backward: Any, b_grad: Any = None, **_hooks: Any) -> Any:
        out = run(forward, None)
        run(None, backward, b_grad=b_grad)
        return out

    def ahead(_trainer: Any) -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(TransformerModelChunkSchedulePlan, "run", one_after_another)

    report = compared_while(ahead)
    # Of every second micro-batch one layer: in the others the layer before it lies there, and is through.
    assert report["eager"]["NESTING"] == sum(COUNTS[step % len(COUNTS)] // 2 for step in range(BREAKS, FEW))
    assert set(report["eager"]) == {"WARMING_UP", "NESTING"} and report["failures"] == []


@pytest.mark.parametrize("reader", ["", "saved", "held"])
@engines
def test_what_a_graph_has_staged_of_a_layer_before_it_is_freed_unless_somebody_can_read_it(
    engine: bool, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what a host's wrapper of nodes had kept, to log it behind the step, had no memory any more."""
    free, freed, run, held = plans.free_if_unread, list[bool](), ScheduleNode.forward, list[Any]()

    def noted(made: Tensor, taken: Tensor) -> bool:
        saving = made.square() if reader == "saved" else None
        is_free = free(made, taken)
        assert (made.untyped_storage().nbytes() == 0) == is_free and made.shape == taken.shape
        del saving
        freed.append(is_free)
        return is_free

    def holding(node: Any, *given: Any) -> Any:
        out = run(node, *given)
        held.extend([out] if node.name == "moe_combine" else [])
        return out

    steps = steps_of(3)
    monkeypatch.setattr(plans, "free_if_unread", noted)
    if reader == "held":
        monkeypatch.setattr(ScheduleNode, "forward", holding)
        train(steps[:BREAKS], "graph", engine=engine)
        assert not freed and all(out.isfinite().all() for out in held)
        return
    compare(steps, engine=engine)
    assert freed == [not reader] * (sum(map(len, steps)) - COUNTS[0]) * (CALLS - 1)


MICROS = steps_of(BREAKS + 2)
_PLACES = [f"{node} {way}" for node in overlap_rig.NODES for way in ("forward", "backward")]
_PLACES.remove("loss_func backward")  # is no node's


def in_place(place: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """In the second micro-batch, beside whose forward the backward of the first runs."""
    number = CALLS + 1 if place.split()[0] in overlap_rig.OF_LAYERS else 2
    return partial(in_nodes, raising(place, number), behind=True)


def without_its_pack() -> contextlib.AbstractContextManager[Any]:
    """The last plan is asked for without the pack that was made for it, as Megatron's own script does."""
    forward = rig.forward

    def dropping(make: Any, micro: Micro, device: torch.device) -> Any:
        def made(*, packed_seq_params: Any, **given: Any) -> Any:
            kept = {} if micro is MICROS[BREAKS][-1] else {"packed_seq_params": packed_seq_params}
            return make(**given, **kept)

        return forward(made, micro, device)

    return mock.patch.object(rig, "forward", dropping)


BROKEN = {place: (in_place(place), OSError, "lost") for place in _PLACES}
BROKEN["packs left out"] = without_its_pack, ValueError, "expected packed_seq_params in build_schedule_plan"


@pytest.mark.parametrize("what", BROKEN)
def test_a_step_that_raises_leaves_the_next_one_right(what: str) -> None:
    breaks, error, said = BROKEN[what]

    @contextlib.contextmanager
    def breaking(trainer: Any) -> Iterator[None]:
        with pytest.raises(error, match=said), breaks():
            yield
        assert moe_rig.tensors_of_calls(trainer) == []
        rig.metrics()  # of its first micro-batches alone

    graphed = train(MICROS, "graph", around=rig.at(BREAKS, breaking))
    undisturbed = [*MICROS[:BREAKS], *MICROS[BREAKS + 1 :]]
    assert_same_bits(train_eager(undisturbed, overlaps=False), graphed)
    report, in_step = rig.ran(graphed.report, WARMING_UP=COUNTS[0] * CALLS), len(MICROS[BREAKS]) * CALLS
    assert report["replays"] >= sum(map(len, MICROS)) * CALLS - COUNTS[0] * CALLS - in_step


def busy(kind: str) -> contextlib.AbstractContextManager[None]:
    """Before each node of this kind its stream is busy."""

    def act(place: str) -> None:
        if (place.split()[0] in overlap_rig.EXCHANGES) == (kind == "communication"):
            keep_busy(LATE_US)

    return in_nodes(act) if kind else contextlib.nullcontext()


def compare_late(count: int, kind: str, scopes: tuple[str, ...], poison: bool, **given: Any) -> None:
    micros = steps_of(count, masks=True)
    eager = train(micros, "eager", overlaps=False)
    with busy(kind):
        plugin = {"cuda_graph_modules": scopes, "poison": poison}
        graphed = train(micros, "graph", plugin=plugin, **given)
    assert_same_bits(eager, graphed)
    check_calls(graphed.report, "graph", sum(map(len, micros)))


@pytest.mark.gpu
@pytest.mark.parametrize(("steps", "scopes"), [(40, BOTH), *LONG])
@pytest.mark.parametrize("kind", ["", *BUSY])
def test_what_a_late_consumer_reads_is_there(kind: str, steps: int, scopes: tuple[str, ...]) -> None:
    compare_late(steps, kind, scopes, poison=True)


@needs_sorting
@pytest.mark.parametrize("is_sooner", [False, True], ids=["", "sooner"])
@pytest.mark.parametrize(
    ("poison", "kind"),
    [(True, ""), *(pytest.param(it, kind, marks=pytest.mark.gpu) for it in (False, True) for kind in BUSY)],
)
def test_a_late_dispatch_reads_what_is_there_in_both_slots(poison: bool, kind: str, is_sooner: bool) -> None:
    compare_late(STEPS, kind, PERMUTES, poison, **({"around": sooner} if is_sooner else {}))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("name", overlap_rig.OF_LAYERS)
def test_a_pass_that_does_not_wait_reads_what_is_not_there(
    name: str, way: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait of Note [Plans], taken out: or the tests above would show nothing."""
    ran, counted, micros = f"_{way}", "_maybe_dtoh_and_synchronize", steps_of(STEPS)
    run, count = getattr(ScheduleNode, ran), getattr(MoEAlltoAllTokenDispatcher, counted)

    def hasty(node: Any, *given: Any) -> Any:
        if name != overlap_rig.name_of(node):
            return run(node, *given)
        with mock.patch.object(node, "event", mock.Mock(record=node.event.record)):  # waits for nothing
            return run(node, *given)

    def late(dispatcher: Any, point: str, given: Any) -> Any:
        counts = count(dispatcher, point, given)  # the host waits, before what is dispatched is made
        keep_busy(LATE_US if point == "before_permutation_1" else 0.0)
        return counts

    eager = train_eager(micros)
    monkeypatch.setattr(ScheduleNode, ran, hasty)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, counted, late)
    with busy("compute" if name in overlap_rig.EXCHANGES else "communication"), pytest.raises(BitsDiffer):
        assert_same_bits(eager, train(micros, mode))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on a GPU")
def test_each_way_of_the_benchmark_is_measured(experts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the profiler is told: each pass of a layer beside another's has their number."""
    parts: list[str] = []

    def traced(trainer: Any, batches: Any) -> Timeline:
        trainer.wall_ms(batches, graphs=True)
        beside = [Span(4.0 + at, 5.0 + at, False, "gemm", part) for at, part in enumerate(parts)]
        work = [Span(0.0, 4.0, False, "spin_kernel"), Span(1.0, 2.0, False, "compute"), *beside]
        return Timeline(work, launches=8)

    def noted(name: str) -> Any:
        parts.extend([name.removeprefix(PART)] if name.startswith(PART) else [])
        return contextlib.nullcontext()

    monkeypatch.setattr(overlap.StepTrainer, "traced", traced)
    monkeypatch.setattr(overlap, "record_function", noted)
    for rounds in ("ROUNDS", "WARM_UP_STEPS"):
        monkeypatch.setattr(overlap, rounds, 1)
    monkeypatch.setattr(StepCase, "distinct_steps", 1)
    case = step_case(64, layers=2, tokens=64)
    seed_streams()
    for way in (overlap.WITHOUT, overlap.EAGER):
        parts.clear()
        found = overlap.measure_overlap(case, way, is_engine=False, times_us=(0, 50), scopes=("attn",))
        megagraph.uninstall()
        assert found["launches"] == [2, 2] and found["share"] == pytest.approx([0, 0.25])
        assert found["products"][1] == len(parts) > 0 or way == overlap.WITHOUT
        for walls, host_us in zip(found["walls"], found["host_us"], strict=True):
            assert len(walls) == len(host_us) == overlap.ROUNDS * case.distinct_steps
            assert all(us * MICRO_BATCHES / 1e3 < wall for us, wall in zip(host_us, walls, strict=True))
    pairs = (MICRO_BATCHES - 1) * case.model.layers
    assert {int(part.partition(" ")[0]) for part in parts} == {0, *range(1, pairs + 1)}
    nodes = {name.replace("attn ", f"{overlap_rig.FIRST} ") for name in found["nodes"]}
    of_layers, late = {*overlap_rig.OF_LAYERS}, {name for name in nodes if name.endswith("weights")}
    assert {name.split()[0] for name in nodes} == of_layers
    assert {name.split()[0] for name in late} == of_layers - {*overlap_rig.EXCHANGES}
