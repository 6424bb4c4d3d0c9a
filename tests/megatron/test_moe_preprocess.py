# SPDX-License-Identifier: Apache-2.0
"""Rows permuted to their experts inside of the router's graph; counts, dispatch and experts eager."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import moe_rig
import pytest
import torch
from host_rig import OwnBlock
from megatron_rig import Install, Pair, report_of, step, steps_of
from moe_rig import PERMUTED, ExpertTrainer, can_permute
from torch import Tensor

from megagraph.megatron.scopes.moe import ROUTER
from megagraph.megatron.scopes.moe_preprocess import PREPROCESS
from megagraph.megatron.seams import permutation_sorts

pytestmark = [
    pytest.mark.usefixtures("experts"),
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]

ROUTER_TOO = ("moe_router", "moe_preprocess")
ALL = ("attn", *ROUTER_TOO)
PADDED = ("drop and pad", "drop and pad, shared experts")


@pytest.mark.skipif(permutation_sorts(), reason="this release sorts")
def test_a_release_that_permutes_by_a_mask_is_named(install: Install) -> None:
    install(cuda_graph_modules=ALL)
    trainer = ExpertTrainer()
    for micros in steps_of(3):
        step(trainer, micros)
    report = report_of(trainer)
    assert report["eager"] == {"WARMING_UP": 3 * 2, "SCOPE_UNSUPPORTED": 2 * 3 * 2}
    assert "this release of megatron-core permutes into shapes that only the" in report["failures"][0]


@pytest.mark.parametrize("case", ("alltoall", "shared experts", *PADDED))
def test_what_leaves_and_in_which_order(case: str) -> None:
    if not can_permute(PERMUTED[case]):
        pytest.skip("this release permutes into shapes that only the device knows")
    trainer = ExpertTrainer(**PERMUTED[case])
    layer, rows, end = trainer.chunk.decoder.layers[0], 24, 20
    hidden = torch.rand(rows, 1, 32, device=trainer.device, dtype=trainer.chunk.config.params_dtype)
    mask = torch.arange(rows, device=trainer.device)[None] >= end
    routed: Any = ROUTER.run(layer, hidden, {"padding_mask": mask})
    normed, all_probs, routing_map, *shared, residual = routed
    out: Any = PREPROCESS.run(layer, routed, {})
    permuted, probs, places, constant, same_map, *same_shared, same_residual = out
    most = moe_rig.EXPERTS * 12 if case in PADDED else rows * 2
    assert permuted.shape == (most, 32) and probs.shape == places.shape == (most,)
    assert torch.equal(permuted, normed.view(rows, 32)[places]) and probs.requires_grad
    assert torch.equal(constant, all_probs) and not constant.requires_grad
    assert same_map is routing_map and same_residual is residual
    assert len(same_shared) == len(shared) and all(a is b for a, b in zip(same_shared, shared, strict=True))
    if case not in PADDED:
        routed_rows = int(routing_map.sum())
        assert routed_rows <= 2 * rows and not probs[routed_rows:].any()
    of_shared = (5,) if shared else ()
    assert PREPROCESS.transient(layer) == (of_shared if case in PADDED else (0, 1, *of_shared))


@pytest.mark.parametrize("scopes", [("attn", "moe_router"), ROUTER_TOO, ALL, ("attn", "moe")], ids=str)
def test_a_block_that_runs_its_layers_itself(install: Install, scopes: Sequence[str]) -> None:
    install(cuda_graph_modules=scopes)
    pair = Pair(ExpertTrainer, **PERMUTED["drop and pad"])
    for trainer in pair.both:
        trainer.chunk.decoder.__class__ = OwnBlock
    report = pair.train(steps_of(5, tails=False))
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 2 * 3 * 2}


def test_a_permutation_of_somebody_elses_is_an_error(install: Install) -> None:
    """It would permute what stands for the rows in the eager part, where nobody reads it."""
    from megatron.core.transformer.moe import token_dispatcher

    install(cuda_graph_modules=ALL)
    trainer = ExpertTrainer(**PERMUTED["drop and pad"])
    for micros in steps_of(2):
        step(trainer, micros)
    ours: Any = token_dispatcher.permute
    with (
        mock.patch.object(token_dispatcher, "permute", ours.__wrapped__),
        pytest.raises(RuntimeError, match="has permuted rows by another function than Megatron's"),
    ):
        step(trainer, steps_of(1)[0])


UNBUILT: dict[str, Any] = {
    "moe_permute_fusion": True,
    "moe_latent_size": 16,
    "moe_router_padding_for_quantization": True,
}


@pytest.mark.parametrize("option", UNBUILT)
def test_an_option_is_refused_by_name(option: str) -> None:
    trainer = ExpertTrainer(**PERMUTED["drop and pad"])
    layer = trainer.chunk.decoder.layers[0]
    assert PREPROCESS.unsupported(layer) is None
    with mock.patch.object(layer.config, option, UNBUILT[option], create=True):
        why = PREPROCESS.unsupported(layer)
    assert why is not None and f"{option}={UNBUILT[option]!r} is not supported yet; leave" in why


def test_overlapped_shared_experts_without_a_norm_before_them_are_refused_by_name() -> None:
    """Normed hidden states and the residual are one tensor there, whose gradients eager sums in its order."""
    from megatron.core.transformer.identity_op import IdentityOp

    overlapped = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_overlap": True}
    layer = ExpertTrainer(**PERMUTED["drop and pad"], **overlapped).chunk.decoder.layers[0]
    assert PREPROCESS.unsupported(layer) is None
    layer.pre_mlp_layernorm = IdentityOp()
    assert "without a norm before them are not supported yet" in str(PREPROCESS.unsupported(layer))


def test_a_dispatcher_that_a_host_has_patched_is_refused_by_name() -> None:
    layer = ExpertTrainer(**PERMUTED["drop and pad"]).chunk.decoder.layers[0]
    dispatcher = layer.mlp.token_dispatcher

    def dispatch_preprocess(*args: Tensor) -> Any:
        return type(dispatcher).dispatch_preprocess(dispatcher, *args)

    dispatcher.dispatch_preprocess = dispatch_preprocess
    assert "dispatch_preprocess is not Megatron's" in str(PREPROCESS.unsupported(layer))
