# SPDX-License-Identifier: Apache-2.0
"""Megatron's Mamba mixer with the kernels of mamba-ssm and causal-conv1d: the bits of eager, what is counted.

Both libraries have deterministic kernels where torch is told to be deterministic, as in all tests here;
without that two eager runs differ. test_mamba_layers.py has what needs no kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from mamba_rig import Documented
from megatron_rig import OPTIONS, Install, ModelTrainer, Pair
from streams import seeded
from torch import nn

from megagraph.decide.dispatch import Capacity
from megagraph.megatron import seams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # of theirs, at import and in each first call of a kernel
]

PATTERN = "MM*-M*-M"
OF_SYMBOL = {"M": "mamba", "*": "attn", "-": "mlp"}
SMALL = Capacity(tokens=192, num_seqs=8, max_seqlen=192)
LARGE = Capacity(tokens=448, num_seqs=8, max_seqlen=448)
MODEL = dataclasses.replace(OPTIONS, hidden=128, heads=2, max_tokens=448)
# Projections and states of sizes that the kernels take.
MIXER = {"mamba_state_dim": 32, "mamba_head_dim": 32, "mamba_num_groups": 2}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    for package in ("mamba_ssm", "causal_conv1d"):
        pytest.importorskip(package)


def pair_of() -> Pair:
    pair = Pair(seeded(ModelTrainer), pattern=PATTERN, options=MODEL, **MIXER)
    for trainer in pair.both:
        assert {type(layer.mixer).__name__ for layer in mamba_layers(trainer.chunk)} == {"MambaMixer"}
    return pair


def mamba_layers(chunk: nn.Module) -> list[Any]:
    return [module for module in chunk.modules() if hasattr(module, "mixer")]


def packs(count: int, *, says_documents: bool = True) -> list[list[Documented]]:
    """Steps of three packs, no two alike, for both capacities: padded documents, empty ones, tails."""

    def pack(index: int) -> Documented:
        lengths = tuple(3 + (29 * index + 17 * place) % 71 for place in range(1 + index % 8))
        padded = tuple(-(-length // 8) * 8 for length in lengths) if index % 2 else None
        if index % 7 == 3 and padded is None:
            lengths = (*lengths[:2], 0, 5)
        tail = 5 * (index % 9 == 4)
        return Documented(
            lengths=lengths, seed=index, tail=tail, padded=padded, says_documents=says_documents
        )

    return [[pack(3 * number + place) for place in range(3)] for number in range(count)]


def train(pair: Pair, steps: int, *, says_documents: bool = True) -> dict[str, Any]:
    """Trains both, which must leave the same bits, and evaluates them now and then."""
    for number, micros in enumerate(packs(steps, says_documents=says_documents)):
        pair.step(*micros)
        if number % 25 == 10:
            pair.evaluate(micros[0])
            pair.evaluate(micros[1])
    return pair.report()


@pytest.mark.parametrize("scopes", [(), ("mamba", "attn")], ids=["whole", "mamba attn"])
def test_a_hundred_steps_have_the_bits_of_eager(install: Install, scopes: Sequence[str]) -> None:
    install(cuda_graph_modules=scopes, capacities=(SMALL, LARGE))
    graphed = sum(not scopes or OF_SYMBOL[symbol] in scopes for symbol in PATTERN)
    pair = pair_of()
    report = train(pair, 100)
    assert report["failures"] == [] and report["layers"] == graphed
    assert set(report["eager"]) == {"WARMING_UP"}
    assert report["replays"] >= 0.95 * report["calls"]
    grads = dict(pair.graphed.named_main_grads())
    for layer in mamba_layers(pair.graphed.chunk):
        for name, param in layer.named_parameters():
            assert param.main_grad.abs().max() > 0, name
    assert not any(grad.isnan().any() for grad in grads.values())


def test_packs_that_say_no_documents_are_what_eager_makes_of_them(install: Install) -> None:
    if not seams.packs_say_documents():
        pytest.skip("mixers of this release know the documents by the offsets")
    install(capacities=(LARGE,))
    report = train(pair_of(), 10, says_documents=False)
    assert report["failures"] == [] and set(report["eager"]) == {"WARMING_UP"}


def test_replays_call_no_kernel_of_the_scan(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the host launches are graphs."""
    from mamba_ssm.ops.triton import ssd_combined

    install(capacities=(LARGE,))
    pair = pair_of()
    (micros,) = packs(1)
    pair.step(*micros, times=3)
    forward, calls = ssd_combined._mamba_chunk_scan_combined_fwd, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(ssd_combined, "_mamba_chunk_scan_combined_fwd", counted)
    pair.step(*micros)
    assert len(calls) == PATTERN.count("M") * len(micros)  # of the eager model beside the graphed one
