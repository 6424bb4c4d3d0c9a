# SPDX-License-Identifier: Apache-2.0
"""Whatever changes of what a captured layer reads: eager's bits at once, and graphs again where possible."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import megatron_rig as rig
import pytest
import torch
from same_bits import assert_same_bits
from state_changes import CHANGES, Undo, probes_in_place_of_mlps

import megagraph
from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import Trainer


@pytest.fixture(autouse=True)
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    probes_in_place_of_mlps(monkeypatch)


OURS, ENGINE = "our attention", "Transformer Engine"
# Who sees a change is the same in both kinds of layers: one change for each way in which it is seen.
IN_ENGINE = (
    *("adapter off", "list in place", "another configuration", "mode of the model", "forward of a layer"),
    *("another norm", "a copy of a layer", "hook", "buffer in place", "normalised weight"),
)


def _table(names: Collection[str]) -> pytest.MarkDecorator:
    """Each of these changes in our layers, and some of them in those of Transformer Engine."""
    rows: list[Any] = [pytest.param(name, OURS, id=f"{name}-{OURS}") for name in names]
    rows += [
        pytest.param(name, ENGINE, marks=[pytest.mark.gpu, rig.needs_engine], id=f"{name}-{ENGINE}")
        for name in names
        if name in IN_ENGINE
    ]
    return pytest.mark.parametrize(("name", "layers"), rows)


def _pair_of(layers: str) -> rig.Pair:
    if layers == OURS:
        return rig.Pair()
    return rig.Pair(spec=rig.te_layer_spec(), config={"apply_rope_fusion": True})


@_table(CHANGES)
def test_a_change_between_steps(name: str, layers: str, install: rig.Install) -> None:
    change = CHANGES[name]
    warm_up = 1 if layers == OURS else 2  # those of Transformer Engine set attributes in their first step
    install(cuda_graph_warmup_steps=warm_up)
    pair = _pair_of(layers)
    pair.step(rig.ONE, times=warm_up)
    losses = pair.step(rig.TWO, update=False).losses
    pair.eager.chunk.zero_grad()  # of parameters that neither DDP nor the optimizer knows
    pair.graphed.chunk.zero_grad()
    before = pair.report()
    assert before["eager"] == {"WARMING_UP": warm_up * rig.LAYERS}

    undo = change.of_both(pair)
    changed = pair.step(rig.TWO).losses
    assert torch.equal(changed[0], losses[0]) is not change.matters, "the change changes nothing"
    assert rig.eager_since(pair.report(), before) == (
        {change.reason.name: rig.LAYERS} if change.reason is not None else {}
    )
    before = pair.report()
    pair.step(rig.ONE, times=2)
    if change.stays_eager:
        assert set(rig.eager_since(pair.report(), before)) <= {"FOREIGN_HOOK", "SHARED_PARAMETER"}
    else:
        assert rig.eager_since(pair.report(), before) == {}
    if change.lasts:
        return

    before = pair.report()
    undo()
    pair.step(rig.TWO)
    eager_back = sum(rig.eager_since(pair.report(), before).values())
    assert eager_back == (rig.LAYERS if change.is_eager_back else 0), rig.eager_since(pair.report(), before)
    before = pair.report()
    pair.step(rig.ONE)
    assert rig.eager_since(pair.report(), before) == {}


def _changing_step(trainer: Trainer, do: Callable[[], None], undo: Callable[[], None]) -> rig.Step:
    """A step whose second micro-batch runs changed."""

    def micros() -> Iterator[rig.Micro]:
        yield rig.ONE
        do()
        yield rig.TWO

    trainer.zero_grad()
    try:
        losses = rig.schedule(trainer.model, micros(), 2, trainer.device)
    finally:
        undo()
    return rig.Step(losses=losses, grads=rig.grads(trainer.chunk))


# Every call asks what every boundary asks but for containers and memory: one change for each way of asking.
IN_STEP = (
    *(
        "adapter off",
        "merged adapter",
        "float",
        "text",
        "another list",
        "function",
        "tensor",
        "tensor in place",
    ),
    *("configuration of its own", "another configuration", "Megatron's configuration", "buffer in place"),
    *(
        "mode of one module",
        "mode of the model",
        "forward of a layer",
        "forward of a class",
        "value of a class",
    ),
    *("property of a class", "another norm", "a copy of a layer", "another list of layers"),
    *("hook", "hook before a forward", "hook on all modules"),
)


@_table(IN_STEP)
def test_a_change_inside_a_step(name: str, layers: str, install: rig.Install) -> None:
    change = CHANGES[name]
    install()
    pair = _pair_of(layers)
    pair.step(rig.ONE, times=2)
    before = pair.report()

    def changing(trainer: Trainer) -> rig.Step:
        undos: list[Undo] = []
        return _changing_step(
            trainer, lambda: undos.append(change.do(trainer)), lambda: [it() for it in undos] and None
        )

    assert_same_bits(*pair.each(changing))
    # Of the second micro-batch alone.
    assert rig.eager_since(pair.report(), before) == (
        {"STATE_CHANGED": rig.LAYERS} if change.reason is not None else {}
    )
    before = pair.report()
    pair.step(rig.ONE)
    expected = rig.LAYERS if change.is_eager_back and not change.stays_eager else 0
    assert sum(rig.eager_since(pair.report(), before).values()) in (0, expected)
    before = pair.report()
    pair.step(rig.TWO)
    assert rig.eager_since(pair.report(), before) == {}


def test_states_that_have_graphs_replay_however_often_they_alternate(pair: rig.Pair) -> None:
    pair.step(rig.ONE, times=2)
    changes = [CHANGES[name] for name in ("adapter off", "text", "mode of the model")]
    for change in changes:
        undo = change.of_both(pair)
        pair.step(rig.ONE, times=2)
        undo()
    before = pair.report()
    assert before["eager"] == {"WARMING_UP": rig.LAYERS, "STATE_CHANGED": 3 * rig.LAYERS}
    for _ in range(2):
        for change in changes:
            undo = change.of_both(pair)
            pair.step(rig.ONE)
            undo()
            pair.step(rig.TWO)
    assert rig.eager_since(pair.report(), before) == {}
    assert len(before["states"]) == 4 and before["states"][0] == "the first one"
    assert "_adapter_enabled True -> False" in before["states"][1]


def test_of_more_states_than_may_have_graphs_the_oldest_go(install: rig.Install) -> None:
    install(cuda_graph_max_states=2)
    pair = rig.Pair()
    pair.step(rig.ONE, times=2)
    graphs = pair.report()["graphs"]
    for name in ("text", "flag"):
        undo = CHANGES[name].of_both(pair)
        pair.step(rig.ONE, times=2)
        undo()
        assert pair.report()["graphs"] == 2 * graphs
    before = pair.report()
    undo = CHANGES["flag"].of_both(pair)
    pair.step(rig.ONE)
    undo()
    assert rig.eager_since(pair.report(), before) == {}
    pair.step(rig.ONE)  # the first state's graphs have gone
    assert rig.eager_since(pair.report(), before) == {"STATE_CHANGED": rig.LAYERS}


def test_more_states_than_may_have_graphs_do_not_drive_out_each_other_for_ever(
    install: rig.Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(cuda_graph_max_states=2)
    pair = rig.Pair()
    pair.step(rig.ONE, times=2)
    names = ("text", "flag")

    def round_of_all() -> dict[str, int]:
        before = pair.report()
        for name in names:
            undo = CHANGES[name].of_both(pair)
            pair.step(rig.ONE)
            undo()
        pair.step(rig.ONE)
        return rig.eager_since(pair.report(), before)

    for _ in range(8):
        round_of_all()
    captured = pair.report()["capture_seconds"]
    # Of the three, two replay and one is eager, and nothing is captured any more.
    assert round_of_all() == {"STATE_CHANGED": rig.LAYERS}
    assert round_of_all() == {"STATE_CHANGED": rig.LAYERS}
    assert pair.report()["capture_seconds"] == captured
    assert sum("cuda_graph_max_states is 2" in text for text in caplog.messages) == 1  # of the graphed one


def test_a_value_that_is_new_in_every_step_ends_in_eager_and_one_warning(
    install: rig.Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(cuda_graph_max_states=3)
    pair = rig.Pair()
    pair.step(rig.ONE, times=2)
    before = pair.report()
    for index in range(8):
        for trainer in pair.both:
            trainer.chunk.decoder.layers[1].mlp.number = 1.0 + index
        pair.step(rig.ONE)
    assert rig.eager_since(pair.report(), before) == {"STATE_CHANGED": 7 * rig.LAYERS}
    said = [text for text in caplog.messages if "before each of the last 3 steps" in text]
    assert len(said) == 2  # one of each model
    assert "layer 1.mlp: number" in said[0]


def test_a_schedule_from_the_first_step_on_is_never_replayed(install: rig.Install) -> None:
    install(cuda_graph_warmup_steps=2)
    pair = rig.Pair()
    for index in range(7):
        for trainer in pair.both:
            trainer.chunk.decoder.layers[1].mlp.number = 1.0 + index
        pair.step(rig.ONE)
    report = pair.report()
    assert report["replays"] == rig.LAYERS  # the state that was captured, in the step after
    assert report["eager"] == {"WARMING_UP": 2 * rig.LAYERS, "STATE_CHANGED": 4 * rig.LAYERS}


def test_an_evaluation_does_not_capture_training_in_its_own_state(install: rig.Install) -> None:
    """Bug: layers stayed eager whose backward pass does not run in evaluation mode, as some attention's."""
    install(cuda_graph_warmup_steps=1)
    pair = rig.Pair()
    for trainer in pair.both:
        mlp = trainer.chunk.decoder.layers[1].mlp

        def trains_only(hidden: torch.Tensor, mlp: Any = mlp) -> torch.Tensor:
            assert mlp.training or not hidden.requires_grad
            return hidden

        mlp.function = trains_only
    for number in (1.0, 2.0):  # as of modules that are in another state after their first call
        for trainer in pair.both:
            trainer.chunk.decoder.layers[1].mlp.number = number
        pair.step(rig.ONE)
    pair.evaluate(rig.ONE)
    pair.step(rig.ONE, times=2)
    report = pair.report()
    assert report["failures"] == [] and report["replays"] == 2 * rig.LAYERS


SHARED = {"gain": 1.0}


def test_what_nobody_can_see_is_part_of_the_state_once_it_is_watched(pair: rig.Pair) -> None:

    def from_outside(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * SHARED["gain"]

    handles = []
    for trainer in pair.both:
        trainer.chunk.decoder.layers[1].mlp.function = from_outside
        handles.append(megagraph.watch(trainer.chunk.decoder.layers[1], key=lambda: SHARED["gain"]))
    pair.step(rig.ONE, times=2)
    for gain, reasons in ((0.5, {"STATE_CHANGED": rig.LAYERS}), (1.0, {}), (0.5, {})):
        before = pair.report()
        SHARED["gain"] = gain
        pair.step(rig.ONE)
        assert rig.eager_since(pair.report(), before) == reasons
    SHARED["gain"] = 1.0
    for handle in handles:
        handle.remove()
        handle.remove()


def test_what_is_watched_only_after_a_capture_counts_from_the_next_step_on(pair: rig.Pair) -> None:
    pair.step(rig.ONE, times=2)
    gain = [1.0]
    handles = [megagraph.watch(trainer.chunk, key=lambda: gain[0]) for trainer in pair.both]
    for value, reasons in (
        (1.0, {"STATE_CHANGED": rig.LAYERS}),
        (0.5, {"STATE_CHANGED": rig.LAYERS}),
        (1.0, {}),
    ):
        before, gain[0] = pair.report(), value
        pair.step(rig.ONE)
        assert rig.eager_since(pair.report(), before) == reasons
    for handle in handles:
        handle.remove()
    before, gain[0] = pair.report(), 0.25
    pair.step(rig.ONE)  # as it was captured first
    assert rig.eager_since(pair.report(), before) == {}


def test_watch_says_what_it_expects() -> None:
    with pytest.raises(TypeError, match=r"watch\(\): expected a torch.nn.Module, got int"):
        megagraph.watch(5, key=lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"watch\(\): key: expected a function without arguments, got int"):
        megagraph.watch(torch.nn.Identity(), key=5)  # type: ignore[arg-type]


def test_what_is_left_out_by_name_is_reported(pair: rig.Pair) -> None:
    for trainer in pair.both:
        trainer.chunk.decoder.layers[0].current_microbatch = 0
    pair.step(rig.ONE, times=2)
    for index in range(4):
        pair.graphed.chunk.decoder.layers[0].current_microbatch = index
        pair.step(rig.ONE)
    report = pair.report()
    assert report["eager"] == {EagerReason.WARMING_UP.name: rig.LAYERS}
    assert "current_microbatch" in report["unguarded"]
