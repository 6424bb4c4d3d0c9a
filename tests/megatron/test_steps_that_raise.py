# SPDX-License-Identifier: Apache-2.0
"""Steps that end in an error: what they leave is freed, or named, and later steps have the bits of eager."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import pytest
from same_bits import assert_same_bits

from megagraph.demo.trainer import Trainer

Break = Callable[[Trainer], object]


class Broken(Exception):
    """What the host's code raises; keeps what that was given, and itself."""

    def __init__(self, *given: Any, **_named: Any) -> None:
        super().__init__("of this step")
        self.given, self.me = given, self


def _fail(*args: Any, **kwargs: Any) -> None:
    raise Broken(*args, **kwargs)


def _broken_step(trainer: Trainer) -> Broken:
    """Raises between the forward and the backward of a micro-batch. Returns the error, without its frames."""

    def forward_step(data: Iterator[rig.Micro], chunk: Any) -> Any:
        _fail(rig.forward(chunk, next(data), trainer.device)[0])

    trainer.zero_grad()
    with pytest.raises(Broken) as error:
        rig.run_schedule(trainer.model, forward_step, [rig.ONE], 1)
    raised = error.value
    raised.__traceback__ = None
    return raised


def _broken_call(trainer: Trainer) -> None:
    """Raises behind the layers of a call outside of any schedule."""
    trainer.zero_grad()
    with mock.patch.object(trainer.chunk.output_layer, "_call_impl", _fail), pytest.raises(Broken):
        rig.forward(trainer.model, rig.ONE, trainer.device)


def _broken_layer(trainer: Trainer) -> None:
    with mock.patch.object(trainer.chunk.decoder.layers[1].mlp, "_call_impl", _fail), pytest.raises(Broken):
        rig.step(trainer, [rig.ONE])


EXPERTS = {"make": moe_rig.ExpertTrainer, "kinds": "E-", **moe_rig.CASES["shared experts"]}


@pytest.mark.usefixtures("experts")
@pytest.mark.parametrize(
    ("scopes", "broken", "model"),
    [
        *(((), broken, {}) for broken in (_broken_call, _broken_step)),
        *((("attn",), _broken_step, {}), (("mlp",), _broken_call, {})),
        *((("attn", "moe_router"), broken, EXPERTS) for broken in (_broken_step, _broken_layer)),
    ],
)
def test_what_nobody_holds_of_a_broken_step_goes_in_the_next(scopes: Any, broken: Break, model: Any) -> None:
    """Bugs: garbage stayed after a call outside of any schedule, a slot stayed taken for a step longer."""
    pair = rig.Pair(plugin={"cuda_graph_modules": scopes}, **model)
    pair.step(rig.ONE, rig.TWO, times=3)
    before = pair.report()["eager"]
    pair.each(broken)
    rig.metrics()  # of their first micro-batches alone
    pair.step(rig.ONE, rig.TWO, times=2)
    assert pair.report()["eager"] == before


def test_what_somebody_holds_is_named_once_and_keeps_micro_batches_eager(pair: rig.Pair, caplog: Any) -> None:
    pair.step(rig.ONE, rig.TWO, times=3)
    held = pair.each(_broken_step)[1]
    pair.step(rig.ONE, rig.TWO, times=2)
    assert pair.report()["eager"]["NO_FREE_SLOT"] == 2 * 2 * rig.LAYERS
    said = [text for text in caplog.messages if "a step that raised has left tensors" in text]
    assert len(said) == 1 and "pending backward of site" in said[0]
    held.given = held.me = None
    del held
    pair.step(rig.ONE, rig.TWO)
    assert pair.report()["eager"]["NO_FREE_SLOT"] == 2 * 2 * rig.LAYERS


def _fails_second() -> Callable[..., None]:
    calls = itertools.count(1)
    return lambda *given: _fail(*given) if next(calls) == 2 else None


def _raise_in_loss(trainer: Trainer) -> None:
    """In the loss function of the second of three micro-batches."""
    mean_loss, fails = rig.mean_loss, _fails_second()
    with mock.patch.object(rig, "mean_loss", lambda *it, **given: fails(*it) or mean_loss(*it, **given)):
        rig.schedule(trainer.model, [rig.ONE, rig.TWO, rig.OTHER], 3, trainer.device)


def _raise_in_backward(trainer: Trainer, *, of: str) -> None:
    """In a hook of a parameter outside of the layers, in the second of three micro-batches."""
    with trainer.chunk.get_parameter(of).register_hook(_fails_second()):
        rig.schedule(trainer.model, [rig.ONE, rig.TWO, rig.OTHER], 3, trainer.device)


@pytest.mark.parametrize(
    "broken",
    [
        _raise_in_loss,
        partial(_raise_in_backward, of="decoder.final_layernorm.weight"),
        partial(_raise_in_backward, of="embedding.word_embeddings.weight"),
    ],
)
@pytest.mark.parametrize("is_warm", [False, True], ids=["while-warming-up", "while-replaying"])
def test_training_goes_on_with_eager_bits(broken: Break, is_warm: bool, pair: rig.Pair) -> None:
    if is_warm:
        pair.step(rig.ONE, rig.TWO, times=2)

    def attempt(trainer: Trainer) -> rig.Step:
        trainer.zero_grad()
        with pytest.raises(Broken):
            broken(trainer)
        return rig.Step(losses=[], grads=rig.grads(trainer.chunk))

    # What the broken step has added is that of eager too.
    assert_same_bits(*pair.each(attempt))

    # On top of it, as a host that only counts the error would go on.
    assert_same_bits(*pair.each(partial(rig.step, micros=[rig.TWO, rig.ONE], update=False, adds=True)))
    pair.step(rig.ONE, rig.OTHER, times=2)
    # Two micro-batches of the broken step ran. One that raised is no step of the warm-up.
    replays = ((2 + 2 + 2 if is_warm else 0) + 2 * 2) * rig.LAYERS
    pair.ran(replays, WARMING_UP=(2 if is_warm else 2 + 2) * rig.LAYERS)
