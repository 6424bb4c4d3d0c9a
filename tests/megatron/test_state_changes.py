# SPDX-License-Identifier: Apache-2.0
"""Whatever changes of what a captured layer reads: eager's bits at once, and graphs again where possible."""

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import megatron_rig as rig
import pytest
import torch
from megatron_rig import LAYERS, ONE, OPTIONS, TWO, Install, evaluate, step
from notes import precision
from same_bits import assert_same_bits
from state_changes import CHANGES, Probe, Undo, of_all, probe
from torch.profiler import ProfilerActivity, profile

import megagraph
from megagraph.demo.trainer import Trainer

PROBED = {"prepare": rig.around_mlps(Probe)}


@pytest.fixture
def pair() -> rig.Pair:
    return rig.Pair(**PROBED)


@contextmanager
def _changed(pair: rig.Pair, name: str) -> Iterator[None]:
    undo = of_all(CHANGES[name].do, pair.both)
    yield
    undo()


def _set_number(pair: rig.Pair, number: float) -> None:
    """To what some schedule says."""
    for trainer in pair.both:
        probe(trainer).number = number


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps(name: str, pair: rig.Pair) -> None:
    change = CHANGES[name]
    pair.step(rig.ONE)
    losses = pair.step(rig.TWO, update=False).losses
    pair.eager.chunk.zero_grad()  # of parameters that neither DDP nor the optimizer knows
    pair.graphed.chunk.zero_grad()
    before = pair.ran(WARMING_UP=rig.LAYERS)

    undo, changed = of_all(change.do, pair.both), pair.step(rig.TWO).losses
    assert torch.equal(changed[0], losses[0]) is not change.matters, "the change changes nothing"
    expected = {change.reason.name: rig.LAYERS} if change.reason is not None else {}
    assert rig.eager_since(pair.report(), before) == expected
    costs = pair.costs(rig.ONE, times=2)
    assert set(costs) <= {"FOREIGN_HOOK", "SHARED_PARAMETER"} if change.stays_eager else costs == {}
    if change.lasts:
        return
    undo()
    assert sum(pair.costs(rig.TWO).values()) == (rig.LAYERS if change.is_eager_back else 0)
    assert pair.costs(rig.ONE) == {}


# Every call asks what every boundary asks but for containers and memory: one change for each way of asking.
IN_STEP = (
    *("adapter off", "tensor", "tensor in place", "configuration of its own", "Megatron's configuration"),
    *("mode of the model", "forward of a layer", "forward of a class", "property of a class"),
    *("frozen parameter", "another norm", "a copy of a layer", "another list of layers"),
    *("hook", "hook on all modules"),
)


@pytest.mark.parametrize("name", IN_STEP)
def test_a_change_inside_a_step(name: str, pair: rig.Pair) -> None:
    change = CHANGES[name]
    pair.step(rig.ONE, times=2)
    before = pair.report()

    def changing(trainer: Trainer) -> rig.Step:
        """A step whose second micro-batch runs changed."""
        undos: list[Undo] = []

        def micros() -> Iterator[rig.Micro]:
            yield rig.ONE
            undos.append(change.do(trainer))
            yield rig.TWO

        left = rig.step(trainer, micros(), 2, update=False)
        undos.pop()()
        return left

    assert_same_bits(*pair.each(changing))
    # Of the second micro-batch alone.
    expected = {} if change.reason is None else {"STATE_CHANGED": rig.LAYERS}
    assert rig.eager_since(pair.report(), before) == expected
    back = rig.LAYERS if change.is_eager_back and not change.stays_eager else 0
    assert sum(pair.costs(rig.ONE).values()) in (0, back)
    assert pair.costs(rig.TWO) == {}


@pytest.mark.parametrize("scopes", [(), ("mlp",)])
def test_what_changes_on_the_way_to_a_layer_is_heard(scopes: Sequence[str]) -> None:
    """Bug: replays had the value that there was where the model was entered, or where its block was."""
    pair, wanted = rig.Pair(plugin={"cuda_graph_modules": scopes}, **PROBED), 1.0

    def change(changed: Any, *_given: Any) -> None:
        changed.number = wanted

    for trainer in pair.both:
        on_the_way = trainer.chunk.decoder.layers[1].self_attention if scopes else trainer.chunk.embedding
        on_the_way.register_forward_pre_hook(partial(change, probe(trainer)))
    pair.step(rig.ONE, times=3)
    assert pair.costs(rig.ONE, rig.TWO) == {}
    behind = 1 if scopes else rig.LAYERS
    wanted = 0.5
    assert pair.costs(rig.ONE, rig.TWO) == {"STATE_CHANGED": behind + rig.LAYERS}
    assert pair.costs(rig.ONE, rig.TWO) == {}
    wanted = 1.0  # of which there are graphs
    assert pair.costs(rig.ONE, rig.TWO) == {"STATE_CHANGED": behind}


def test_of_more_states_than_may_have_graphs_the_oldest_go_but_not_for_ever(caplog: Any) -> None:
    pair = rig.Pair(plugin={"cuda_graph_max_states": 2}, **PROBED)
    pair.step(rig.ONE, times=2)
    graphs = pair.report()["graphs"]
    names = ("text", "float")
    for name in names:
        with _changed(pair, name):
            pair.step(rig.ONE, times=2)
        assert pair.report()["graphs"] == 2 * graphs
    with _changed(pair, "float"):
        assert pair.costs(rig.ONE) == {}
    assert pair.costs(rig.ONE) == {"STATE_CHANGED": rig.LAYERS}  # the first state's graphs have gone

    def round_of_all() -> dict[str, int]:
        before = pair.report()
        for name in names:
            with _changed(pair, name):
                pair.step(rig.ONE)
        pair.step(rig.ONE)
        return rig.eager_since(pair.report(), before)

    seconds = [pair.report()["capture_seconds"]]
    for _ in range(8):
        round_of_all()
        seconds.append(pair.report()["capture_seconds"])
    captured = seconds[-1]
    # Those of a state go for those of another one twice at most.
    assert [one != other for one, other in itertools.pairwise(seconds)].count(True) == 3
    # Of the three, two replay and one is eager, and nothing is captured any more.
    assert [round_of_all() for _ in range(2)] == 2 * [{"STATE_CHANGED": rig.LAYERS}]
    assert pair.report()["capture_seconds"] == captured
    assert sum("cuda_graph_max_states is 2" in text for text in caplog.messages) == 1  # of the graphed one


def test_settings_that_change_inside_of_a_step_have_verified_graphs_in_the_next_one() -> None:
    pair, at_step = rig.Pair(), "highest"
    for it in pair.both:
        it.chunk.embedding.register_forward_pre_hook(lambda *_: torch.set_float32_matmul_precision(at_step))

    def changes_inside(trainer: Trainer) -> rig.Step:
        torch.set_float32_matmul_precision("highest")
        return step(trainer, [ONE])

    with precision("highest"):
        pair.step(ONE, times=2)
        at_step = "high"
        assert_same_bits(*pair.each(changes_inside))
        pair.step(ONE)
    pair.ran(verified=2, unverified=0, WARMING_UP=LAYERS, NUMERICS_CHANGED=LAYERS)


def test_a_value_that_is_new_in_every_step_ends_in_eager_and_one_warning(caplog: Any) -> None:
    pair = rig.Pair(plugin={"cuda_graph_max_states": 3}, **PROBED)
    pair.step(rig.ONE, times=2)
    before = pair.report()
    for index in range(8):
        _set_number(pair, 1.0 + index)
        pair.step(rig.ONE)
    assert rig.eager_since(pair.report(), before) == {"STATE_CHANGED": 7 * rig.LAYERS}
    said = [text for text in caplog.messages if "before each of the last 3 steps" in text]
    assert len(said) == 1  # of the model that has graphs
    assert "layer 1.mlp: number" in said[0]


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_value_that_is_new_inside_of_every_step_is_not_captured_for_ever(
    is_put_back: bool, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each step captured for a state that no later call was in, without a word; none was forgotten."""
    pair, forward = rig.Pair(plugin={"cuda_graph_max_states": 3}, **PROBED), rig.forward
    seconds: list[float] = []
    steps = 70 if is_put_back else 20  # of more than 64 states the oldest are forgotten

    def changes(model: Any, *given: Any) -> Any:
        for trainer in pair.both:
            if trainer.model is model:  # or the other one's would change between its steps
                probe(trainer).number = 1.0 + len(seconds)
        return forward(model, *given)

    monkeypatch.setattr(rig, "forward", changes)
    for _ in range(steps):
        pair.step(rig.ONE)
        seconds.append(pair.report()["capture_seconds"])
        if is_put_back:
            _set_number(pair, 0.5)
    assert len(set(seconds)) <= 5 and len(set(seconds[8:])) == 1
    said = [text for text in caplog.messages if "before each of the last 3 steps" in text]
    assert len(said) == (0 if is_put_back else 1)  # of the model that has graphs
    for graphs in rig.the_plugin().all_graphs():
        assert len(graphs.dispatcher.due.due) < 70


def test_an_evaluation_does_not_capture_training_in_its_own_state(pair: rig.Pair) -> None:
    """Bug: layers stayed eager whose backward pass does not run in evaluation mode, as some attention's."""

    def trains_only(hidden: torch.Tensor, mlp: Any) -> torch.Tensor:
        assert mlp.training or not hidden.requires_grad
        return hidden

    for trainer in pair.both:
        probe(trainer).function = partial(trains_only, mlp=probe(trainer))
    for number in (1.0, 2.0):  # as of modules that are in another state after their first call
        _set_number(pair, number)
        pair.step(rig.ONE)
    pair.evaluate(rig.ONE)
    pair.step(rig.ONE, times=2)
    report = pair.report()
    assert report["failures"] == [] and report["replays"] == 2 * rig.LAYERS


def test_what_nobody_can_see_is_part_of_the_state_once_it_is_watched(pair: rig.Pair) -> None:
    gain = [1.0]
    handles = []
    for trainer in pair.both:
        probe(trainer).function = lambda hidden: hidden * gain[0]
        handles.append(megagraph.watch(trainer.chunk.decoder.layers[1], key=lambda: gain[0]))
    pair.step(rig.ONE, times=2)
    for gain[0], reasons in ((0.5, {"STATE_CHANGED": rig.LAYERS}), (1.0, {}), (0.5, {})):
        assert pair.costs(rig.ONE) == reasons
    for handle in 2 * handles:
        handle.remove()


def test_what_is_watched_only_after_a_capture_counts_from_the_next_step_on(pair: rig.Pair) -> None:
    pair.step(rig.ONE, times=2)
    gain, changed = [1.0], {"STATE_CHANGED": rig.LAYERS}
    handles = [megagraph.watch(trainer.chunk, key=lambda: gain[0]) for trainer in pair.both]
    for gain[0], reasons in ((1.0, changed), (0.5, changed), (1.0, {})):
        assert pair.costs(rig.ONE) == reasons
    for handle in handles:
        handle.remove()
    gain[0] = 0.25
    assert pair.costs(rig.ONE) == {}  # as it was captured first


def test_scales_of_further_losses_and_what_is_left_out_by_name_keep_nothing_eager(pair: rig.Pair) -> None:
    """Schedules alone ask for the former, new functions in each step; the latter is reported."""
    names = "moe_grad_scale_func", "mtp_grad_scale_func", "experimental_attention_variant_loss_scale_func"
    for trainer in pair.both:
        trainer.chunk.decoder.layers[0].current_microbatch = 0
    for index in range(6):
        for trainer, name in itertools.product(pair.both, names):
            setattr(trainer.chunk.config, name, lambda *_given: torch.ones(1))
        pair.graphed.chunk.decoder.layers[0].current_microbatch = max(index - 2, 0)
        pair.step(rig.ONE)
    assert "current_microbatch" in pair.ran(WARMING_UP=rig.LAYERS)["unguarded"]


@pytest.mark.parametrize("asked", [True, False])
def test_replays_are_ranges_that_name_site_variant_and_slot_if_asked(install: Install, asked: bool) -> None:
    install(cuda_graph_nvtx=asked)
    trainer = Trainer(OPTIONS)
    step(trainer, [ONE, TWO], times=2)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        step(trainer, [ONE, TWO])
    found = [event.name for event in trace.events() if event.name.startswith("layer ")]
    variant, ways = "training, 64 tokens, 5 documents of up to 64, slot 0", ("forward", "backward")
    expected = [f"layer {it} (TransformerLayer), {variant} {way}" for it in range(LAYERS) for way in ways]
    assert sorted(found) == (sorted(2 * expected) if asked else [])


def test_each_interval_of_training_steps_has_a_line(install: Install, caplog: Any) -> None:
    install(log_interval=2)
    trainer = Trainer(OPTIONS)
    with caplog.at_level(logging.INFO, logger="megagraph"):
        for _ in range(4):
            step(trainer, [ONE, TWO])
            evaluate(trainer, [ONE])  # is no training step
    lines = [record.getMessage() for record in caplog.records if "layer calls" in record.getMessage()]
    calls = 2 * LAYERS
    guards = "- names left out; {0} verified in - s"
    assert [re.sub(r"in [\d.]+ s$", "in - s", re.sub(r"\d+ names", "- names", line)) for line in lines] == [
        f"steps 1-2: GPTModel: {calls} of {2 * calls + LAYERS} layer calls replayed, {calls + LAYERS} eager "
        f"(WARMING_UP {calls + LAYERS}); 1 state captured, {guards.format(1)}",
        f"steps 3-4: GPTModel: {2 * calls + 2 * LAYERS} of {2 * calls + 2 * LAYERS} layer calls replayed, "
        f"0 eager; 2 states captured, {guards.format(2)}",
    ]
