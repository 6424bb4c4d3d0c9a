# SPDX-License-Identifier: Apache-2.0
"""Whatever changes of what a captured layer reads: eager's bits at once, and graphs again where possible."""

import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from changing import Change, Undo
from megatron_rig import LAYERS, Micro, Pair, Step, grads, schedule, step, te_layer_spec
from same_bits import assert_same_bits
from state_changes import CHANGES
from state_rig import probes_in_place_of_mlps

import megagraph
from megagraph.config import GraphConfig
from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import Trainer

pytestmark = pytest.mark.megatron

ONE, TWO = Micro(lengths=(9, 20)), Micro(lengths=(3, 30, 8), seed=1)
STEP = 2 * LAYERS  # calls of a step
Install = Callable[..., GraphConfig]


@pytest.fixture(autouse=True)
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    probes_in_place_of_mlps(monkeypatch)


OURS, ENGINE = "our attention", "Transformer Engine"
NEEDS_ENGINE = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
]
# Who sees a change is the same in both kinds of layers: one change for each way in which it is seen.
IN_ENGINE = (
    *("adapter off", "list in place", "another configuration", "mode of the model", "forward of a layer"),
    *("another norm", "a copy of a layer", "hook", "buffer in place", "normalised weight"),
)


def _table(names: Collection[str]) -> pytest.MarkDecorator:
    """Each of these changes in our layers, and some of them in those of Transformer Engine."""
    rows: list[Any] = [pytest.param(name, OURS, id=f"{name}-{OURS}") for name in names]
    rows += [
        pytest.param(name, ENGINE, marks=NEEDS_ENGINE, id=f"{name}-{ENGINE}")
        for name in names
        if name in IN_ENGINE
    ]
    return pytest.mark.parametrize(("name", "layers"), rows)


def _pair_of(layers: str) -> Pair:
    if layers == OURS:
        return Pair()
    return Pair(spec=te_layer_spec(), config={"apply_rope_fusion": True})


def _eager_since(pair: Pair, before: dict[str, Any]) -> dict[str, int]:
    since = Counter(pair.report()["eager"])
    since.subtract(before["eager"])
    return {reason: count for reason, count in since.items() if count}


def _do(pair: Pair, change: Change) -> Undo:
    undos: list[Undo] = []
    for trainer in pair.both:
        is_shared = undos and change.do.__qualname__.startswith(("on_class", "hooks_all"))
        if not is_shared:
            undos.append(change.do(trainer))
    return lambda: [undo() for undo in reversed(undos)] and None


def _losses_of_eager(pair: Pair) -> list[torch.Tensor]:
    losses = step(pair.eager, [ONE, TWO], update=False, eager=True).losses
    pair.eager.chunk.zero_grad()  # of parameters that neither DDP nor the optimizer knows
    return losses


@_table(CHANGES)
def test_a_change_between_steps(name: str, layers: str, install: Install) -> None:
    change = CHANGES[name]
    install(cuda_graph_warmup_steps=2)
    pair = _pair_of(layers)
    pair.step(ONE, TWO, times=3)
    before, losses = pair.report(), _losses_of_eager(pair)
    assert before["eager"] == {"WARMING_UP": 2 * STEP}

    undo = _do(pair, change)
    if change.matters:
        assert not all(map(torch.equal, losses, _losses_of_eager(pair))), "the change changes nothing"
    pair.step(ONE, TWO)
    assert _eager_since(pair, before) == ({change.reason.name: STEP} if change.reason is not None else {})
    changed = pair.report()
    pair.step(TWO, ONE, times=2)
    if change.stays_eager:
        assert set(_eager_since(pair, changed)) <= {"FOREIGN_HOOK", "SHARED_PARAMETER"}
    else:
        assert _eager_since(pair, changed) == {}
    lasting = pair.report()
    if change.lasts:
        return

    undo()
    pair.step(TWO, ONE)
    eager_back = sum(_eager_since(pair, lasting).values())
    assert eager_back == (STEP if change.is_eager_back else 0), _eager_since(pair, lasting)
    back = pair.report()
    pair.step(ONE, TWO)
    assert _eager_since(pair, back) == {}


def _changing_step(trainer: Trainer, do: Callable[[], None], undo: Callable[[], None]) -> Step:
    """A step whose second micro-batch runs changed."""

    def micros() -> Iterator[Micro]:
        yield ONE
        do()
        yield TWO

    trainer.zero_grad()
    try:
        losses = schedule(trainer.model, micros(), 2, trainer.device)
    finally:
        undo()
    return Step(losses=losses, grads=grads(trainer.chunk))


IN_STEP = [name for name, change in CHANGES.items() if change.in_step]


@_table(IN_STEP)
def test_a_change_inside_a_step(name: str, layers: str, install: Install) -> None:
    change = CHANGES[name]
    install(cuda_graph_warmup_steps=2)
    pair = _pair_of(layers)
    pair.step(ONE, TWO, times=3)
    before = pair.report()

    def changing(trainer: Trainer) -> Step:
        undos: list[Undo] = []
        return _changing_step(
            trainer, lambda: undos.append(change.do(trainer)), lambda: [it() for it in undos] and None
        )

    with megagraph.disable_cuda_graphs_this_step():
        eager = changing(pair.eager)
    assert_same_bits(changing(pair.graphed), eager)
    # Of the second micro-batch alone.
    assert _eager_since(pair, before) == ({"STATE_CHANGED": LAYERS} if change.reason is not None else {})
    after = pair.report()
    pair.step(ONE, TWO)
    expected = STEP if change.is_eager_back and not change.stays_eager else 0
    assert sum(_eager_since(pair, after).values()) in (0, expected)
    back = pair.report()
    pair.step(TWO, ONE)
    assert _eager_since(pair, back) == {}


def test_states_that_have_graphs_replay_however_often_they_alternate(install: Install) -> None:
    install()
    pair = Pair()
    pair.step(ONE, TWO, times=2)
    changes = [CHANGES[name] for name in ("adapter off", "text", "mode of the model")]
    for change in changes:
        undo = _do(pair, change)
        pair.step(ONE, TWO, times=2)
        undo()
    before = pair.report()
    assert before["eager"] == {"WARMING_UP": STEP, "STATE_CHANGED": 3 * STEP}
    for _ in range(3):
        for change in changes:
            undo = _do(pair, change)
            pair.step(ONE, TWO)
            undo()
            pair.step(TWO)
    assert _eager_since(pair, before) == {}
    assert len(before["states"]) == 4 and before["states"][0] == "the first one"
    assert "_adapter_enabled True -> False" in before["states"][1]


def test_of_more_states_than_may_have_graphs_the_oldest_go(install: Install) -> None:
    install(cuda_graph_max_states=2)
    pair = Pair()
    pair.step(ONE, times=2)
    graphs = pair.report()["graphs"]
    for name in ("text", "flag"):
        undo = _do(pair, CHANGES[name])
        pair.step(ONE, times=2)
        undo()
        assert pair.report()["graphs"] == 2 * graphs
    before = pair.report()
    undo = _do(pair, CHANGES["flag"])
    pair.step(ONE)
    undo()
    assert _eager_since(pair, before) == {}
    pair.step(ONE)  # the first state's graphs have gone
    assert _eager_since(pair, before) == {"STATE_CHANGED": LAYERS}


def test_more_states_than_may_have_graphs_do_not_drive_out_each_other_for_ever(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(cuda_graph_max_states=2)
    pair = Pair()
    pair.step(ONE, times=2)
    names = ("text", "flag")

    def round_of_all() -> dict[str, int]:
        before = pair.report()
        for name in names:
            undo = _do(pair, CHANGES[name])
            pair.step(ONE)
            undo()
        pair.step(ONE)
        return _eager_since(pair, before)

    for _ in range(8):
        round_of_all()
    captured = pair.report()["capture_seconds"]
    # Of the three, two replay and one is eager, and nothing is captured any more.
    assert round_of_all() == {"STATE_CHANGED": LAYERS}
    assert round_of_all() == {"STATE_CHANGED": LAYERS}
    assert pair.report()["capture_seconds"] == captured
    assert sum("cuda_graph_max_states is 2" in text for text in caplog.messages) == 1  # of the graphed one


def test_a_value_that_is_new_in_every_step_ends_in_eager_and_one_warning(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(cuda_graph_max_states=3)
    pair = Pair()
    pair.step(ONE, times=2)
    before = pair.report()
    for index in range(8):
        for trainer in pair.both:
            trainer.chunk.decoder.layers[1].mlp.number = 1.0 + index
        pair.step(ONE)
    assert _eager_since(pair, before) == {"STATE_CHANGED": 7 * LAYERS}
    said = [text for text in caplog.messages if "before each of the last 3 steps" in text]
    assert len(said) == 2  # one of each model
    assert "layer 1.mlp: number" in said[0]


def test_a_schedule_from_the_first_step_on_is_never_replayed(install: Install) -> None:
    install(cuda_graph_warmup_steps=2)
    pair = Pair()
    for index in range(7):
        for trainer in pair.both:
            trainer.chunk.decoder.layers[1].mlp.number = 1.0 + index
        pair.step(ONE)
    report = pair.report()
    assert report["replays"] == LAYERS  # the state that was captured, in the step after
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "STATE_CHANGED": 4 * LAYERS}


SHARED = {"gain": 1.0}


def test_what_nobody_can_see_is_part_of_the_state_once_it_is_watched(install: Install) -> None:
    install()
    pair = Pair()

    def from_outside(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * SHARED["gain"]

    handles = []
    for trainer in pair.both:
        trainer.chunk.decoder.layers[1].mlp.function = from_outside
        handles.append(megagraph.watch(trainer.chunk.decoder.layers[1], key=lambda: SHARED["gain"]))
    pair.step(ONE, times=2)
    for gain, reasons in ((0.5, {"STATE_CHANGED": LAYERS}), (1.0, {}), (0.5, {})):
        before = pair.report()
        SHARED["gain"] = gain
        pair.step(ONE)
        assert _eager_since(pair, before) == reasons
    SHARED["gain"] = 1.0
    for handle in handles:
        handle.remove()
        handle.remove()


def test_what_is_watched_only_after_a_capture_counts_from_the_next_step_on(install: Install) -> None:
    install()
    pair = Pair()
    pair.step(ONE, times=2)
    gain = [1.0]
    handles = [megagraph.watch(trainer.chunk, key=lambda: gain[0]) for trainer in pair.both]
    for value, reasons in ((1.0, {"STATE_CHANGED": LAYERS}), (0.5, {"STATE_CHANGED": LAYERS}), (1.0, {})):
        before, gain[0] = pair.report(), value
        pair.step(ONE)
        assert _eager_since(pair, before) == reasons
    for handle in handles:
        handle.remove()
    before, gain[0] = pair.report(), 0.25
    pair.step(ONE)  # as it was captured first
    assert _eager_since(pair, before) == {}


def test_watch_says_what_it_expects() -> None:
    with pytest.raises(TypeError, match=r"watch\(\): expected a torch.nn.Module, got int"):
        megagraph.watch(5, key=lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"watch\(\): key: expected a function without arguments, got int"):
        megagraph.watch(torch.nn.Identity(), key=5)  # type: ignore[arg-type]


def test_what_is_left_out_by_name_is_reported(install: Install) -> None:
    install()
    pair = Pair()
    for trainer in pair.both:
        trainer.chunk.decoder.layers[0].current_microbatch = 0
    pair.step(ONE, times=2)
    for index in range(4):
        pair.graphed.chunk.decoder.layers[0].current_microbatch = index
        pair.step(ONE)
    report = pair.report()
    assert report["eager"] == {EagerReason.WARMING_UP.name: LAYERS}
    assert "current_microbatch" in report["unguarded"]
