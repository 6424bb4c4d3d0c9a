# SPDX-License-Identifier: Apache-2.0
"""Megatron's fused functions are compiled, and compiled again for new shapes: bits stay those of eager."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config
from megatron_rig import LAYERS, ON_GPU, OPTIONS, Micro, compare_runs, graph_config, step
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import megagraph
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer

ROWS = 64
FUSED = {"bias_dropout_fusion": True, "bias_activation_fusion": True}
# What a compiler says of itself.
QUIET = "ignore::UserWarning:torch"


@pytest.fixture(scope="module", autouse=True)
def compiler(megatron: None) -> Iterator[None]:
    """torch.compile, where it works at all, with nothing compiled before."""
    torch._dynamo.reset()
    # Processes of its own take longer to start, and so does asking which vector units there are.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        try:
            _bias_gelu(ROWS)
        except Exception as error:
            pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
        yield
    torch._dynamo.reset()


def _leaves(rows: int, count: int, *shape: int) -> list[Tensor]:
    """The first rows of as many inputs, and a bias."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(ROWS, 1, *shape, generator=generator)[:rows] for _ in range(count)]
    drawn.append(torch.randn(*shape, generator=generator))
    return [each.to(device).requires_grad_() for each in drawn]


def _bias_gelu(rows: int) -> list[Tensor]:
    """Output and gradients of the fused activation."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    hidden, grad, bias = _leaves(rows, 2, 4 * OPTIONS.hidden)
    out = bias_gelu_impl(hidden, bias)
    return [out.detach(), *torch.autograd.grad(out, [hidden, bias], grad.detach())]


def _bias_dropout_add(rows: int) -> list[Tensor]:
    """Output and gradients of the fused residual addition, with a dropout of 0."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    hidden, residual, bias = _leaves(rows, 2, OPTIONS.hidden)
    out = get_bias_dropout_add(training=True, fused=True)((hidden, bias), residual, 0.0)
    return [out.detach(), *torch.autograd.grad(out, [hidden, residual, bias], torch.ones_like(out))]


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("fused", [_bias_gelu, _bias_dropout_add])
def test_a_new_shape_compiles_again_and_changes_no_bit_of_the_old_one(
    fused: Callable[[int], list[Tensor]],
) -> None:
    from torch._dynamo.utils import counters

    first = fused(ROWS)
    before = counters["stats"]["unique_graphs"]
    shorter = fused(ROWS // 2 + 5)
    assert counters["stats"]["unique_graphs"] > before
    # What the first shape gets from now on, whichever of the compiled functions answers.
    again = fused(ROWS)
    assert all(map(torch.equal, first[:-1], again[:-1]))
    # A GPU may add the bias's gradient up in another order.
    assert ON_GPU or torch.equal(first[-1], again[-1])
    # Row by row the shapes agree; sums over rows need not.
    assert torch.equal(shorter[0], first[0][: ROWS // 2 + 5])
    assert torch.equal(shorter[1], first[1][: ROWS // 2 + 5])


@pytest.mark.filterwarnings(QUIET)
def test_fused_functions_inside_graphs_have_the_bits_of_eager() -> None:
    """Both see the canonical shape, also where packs of other shapes run between them."""
    bank = tuple(Capacity(tokens=tokens, num_seqs=4, max_seqlen=tokens) for tokens in (32, 64))
    misfit = Micro(lengths=(60, 20), seed=9)
    steps = [
        [Micro(lengths=(9, 20), seed=1), misfit],
        [Micro(lengths=(3, 30, 8), seed=2), Micro(lengths=(21,), seed=3)],
        [misfit, Micro(lengths=(50,), seed=4)],
        [Micro(lengths=(5, 6), seed=5), Micro(lengths=(40, 24), seed=6)],
    ]
    graphed = compare_runs(steps, plugin={"capacities": bank}, config={**FUSED, "hidden_dropout": 0.2})
    assert graphed.report["failures"] == []
    assert graphed.report["replays"] == 5 * LAYERS
    assert graphed.report["eager"] == {"WARMING_UP": LAYERS, "TOO_MANY_TOKENS": 2 * LAYERS}


def test_a_model_that_goes_while_something_is_compiled_disturbs_nothing() -> None:
    """Bug: a model's graphs went inside garbage collection, and read the device in the middle of a trace."""
    megagraph.install(graph_config())
    trainer = Trainer(OPTIONS)
    step(trainer, [Micro(lengths=(9, 20))], times=2)
    layer = weakref.ref(trainer.chunk.decoder.layers[0])
    del trainer
    with FakeTensorMode():
        gc.collect()
    assert layer() is None
    (report,) = megagraph.reports()
    assert report["replays"] == LAYERS
