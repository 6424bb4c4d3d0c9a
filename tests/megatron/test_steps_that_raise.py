# SPDX-License-Identifier: Apache-2.0
"""Steps that end in an error: what they leave behind is freed, or named."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from megatron_rig import LAYERS, Micro, Pair, forward
from torch import Tensor

import megagraph
from megagraph.config import GraphConfig
from megagraph.demo.trainer import Trainer

pytestmark = pytest.mark.megatron

ONE, TWO = Micro(lengths=(9, 20)), Micro(lengths=(3, 30, 8), seed=1)
Install = Callable[..., GraphConfig]


class Broken(Exception):
    """Of a forward step; keeps what it was given, and itself."""

    def __init__(self, losses: Tensor) -> None:
        super().__init__("of this step")
        self.losses, self.me = losses, self


def _broken_step(trainer: Trainer, *, is_eager: bool) -> Broken:
    """Raises between the forward and the backward of a micro-batch. Returns the error, without its frames."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[Micro], chunk: Any) -> Any:
        raise Broken(forward(chunk, next(data), trainer.device)[0])

    trainer.zero_grad()
    eager = megagraph.disable_cuda_graphs_this_step() if is_eager else contextlib.nullcontext()
    with eager, pytest.raises(Broken) as error:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([ONE]),
            model=[trainer.model],
            num_microbatches=1,
            seq_length=64,
            micro_batch_size=1,
        )
    raised = error.value
    raised.__traceback__ = None
    return raised


@pytest.mark.parametrize("scopes", [(), ("attn",), ("mlp",)])
def test_what_is_garbage_is_collected_before_the_next_step(install: Install, scopes: tuple[str, ...]) -> None:
    install(cuda_graph_modules=scopes)
    pair = Pair()
    pair.step(ONE, TWO, times=3)
    before = pair.report()["eager"]
    _broken_step(pair.eager, is_eager=True)
    _broken_step(pair.graphed, is_eager=False)
    pair.step(ONE, TWO, times=2)
    assert pair.report()["eager"] == before


def test_what_somebody_holds_is_named_once_and_keeps_micro_batches_eager(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    pair = Pair()
    pair.step(ONE, TWO, times=3)
    _broken_step(pair.eager, is_eager=True)
    held = _broken_step(pair.graphed, is_eager=False)
    with caplog.at_level(logging.WARNING, logger="megagraph"):
        pair.step(ONE, TWO)
        pair.step(ONE, TWO)
    assert pair.report()["eager"]["NO_FREE_SLOT"] == 2 * 2 * LAYERS
    said = [text for text in caplog.messages if "a step that raised has left tensors" in text]
    assert len(said) == 1 and "pending backward of site" in said[0]
    held.losses = held.me = None  # type: ignore[assignment]
    del held
    pair.step(ONE, TWO)
    assert pair.report()["eager"]["NO_FREE_SLOT"] == 2 * 2 * LAYERS
