# SPDX-License-Identifier: Apache-2.0
"""Dense layers with each attention, in each part that is graphed: the bits of eager, evaluations between."""

import functools
from collections.abc import Callable, Sequence

import parallel_jobs
import pytest
from latent_rig import KINDS, LatentTrainer
from megatron_rig import LAYERS, ON_GPU, ONE, TWO, Install, Pair

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Scopes = Sequence[str]
STEPS, MORE = (8, 2) if ON_GPU else (3, 1)

OVERLAP = {"overlap_grad_reduce": True}
PLAIN: dict[str, Callable[[], Pair]] = {
    "plain": Pair,
    "overlap": functools.partial(Pair, ddp=OVERLAP),
    "overlap, buckets": functools.partial(Pair, ddp={**OVERLAP, "bucket_size": 4000}),
}
LATENT = {kind: functools.partial(Pair, LatentTrainer, kind=kind) for kind in KINDS}
FUSED_ROPE = {
    f"{kind}, fused RoPE": functools.partial(
        Pair, LatentTrainer, kind=kind, config={"apply_rope_fusion": True}
    )
    for kind in ("low rank, YaRN", "plain, YaRN")
}
HALVES: list[Scopes] = [("attn",), ("mlp",), ("attn", "mlp")]
TABLE: list[tuple[str, Callable[[], Pair], Scopes]] = [
    *((name, make, scopes) for name, make in PLAIN.items() for scopes in HALVES),
    *((name, make, scopes) for name, make in LATENT.items() for scopes in ((), *HALVES)),
    *((name, make, scopes) for name, make in FUSED_ROPE.items() for scopes in ((), HALVES[0])),
]


@pytest.mark.parametrize(
    ("make", "scopes"),
    [pytest.param(make, scopes, id=f"{name}-{'+'.join(scopes) or 'layer'}") for name, make, scopes in TABLE],
)
def test_bits(install: Install, make: Callable[[], Pair], scopes: Scopes) -> None:
    install(cuda_graph_modules=scopes)
    pair, steps = make(), parallel_jobs.steps_of(STEPS + MORE)
    report = pair.train(steps[:STEPS])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * LAYERS}
    assert report["replays"] == (STEPS - 1) * 3 * LAYERS
    pair.evaluate(ONE, TWO)
    pair.evaluate(TWO, ONE)
    report = pair.train(steps[STEPS:])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": (3 + 2) * LAYERS}
    assert report["calls"] == ((STEPS + MORE) * 3 + 2 * 2) * LAYERS
    assert report["verification"]["verified"] == 2
    # Forwards and backwards for training, forwards for evaluation: of each half, or of layers.
    assert report["graphs"] == 3 * LAYERS
