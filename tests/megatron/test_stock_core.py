# SPDX-License-Identifier: Apache-2.0
"""Against what we did not write: megatron-core's own attention, RoPE and norms, one document at a time."""

import dataclasses
import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.models import backends
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm
from megatron_rig import LAYERS, ONE, OPTIONS, TWO, Install, Micro, Step, grads, report_of, step, weights
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import ModelOptions, Trainer, transformer_config
from megagraph.modules import Norm, VarlenAttention

pytestmark = pytest.mark.both

# Both sides add the same float32 products, in another order: attention per document or per pack,
# GEMMs over one document's rows or all rows. A sum of n terms is off by up to n/2 roundings of 2^-24
# of its largest partial sum; n is at most 128 here (rows of a pack, the MLP's width), and errors of
# about ten such sums follow one another through two layers and back: 10 * 64 * 2^-24 = 4e-5 of a
# tensor's largest entry. In bfloat16, Megatron's attention also rounds scores and probabilities to
# 8 bits, which ours keeps in float32: 2^-8 for each of those roundings.
BOUND = 5e-2 if OPTIONS.bf16 else 4e-5

PACKS = (
    Micro(lengths=(13, 1, 30, 8)),
    Micro(lengths=(64,), seed=1),
    Micro(lengths=(2, 2, 2, 40, 11), seed=2),
    Micro(lengths=(13, 21), padded=(16, 32), seed=3, tail=5),
)
CASES = [
    *((micro, None, {"WARMING_UP": LAYERS}) for micro in PACKS),
    (PACKS[0], 1, {"WARMING_UP": LAYERS}),
    (Micro(lengths=(30, 29, 20)), None, {"TOO_MANY_TOKENS": 2 * LAYERS}),
]


@pytest.fixture(autouse=True)
def no_random_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock attention asks for a random stream of the GPU, to drop out nothing."""
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda tracker: nullcontext())


def stock_spec(**arguments: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # warns at import

    return get_gpt_layer_local_spec(**arguments)


def _one_by_one(options: ModelOptions, taken: dict[str, Tensor], micro: Micro) -> tuple[Tensor, Step]:
    """Each document alone, unpacked, through Megatron's own modules. Losses are document after document."""
    assert not megagraph.reports()
    trainer = Trainer(options, spec=stock_spec())
    missing = trainer.chunk.load_state_dict(taken, strict=False)
    assert not [name for name in missing.missing_keys if not name.endswith("_extra_state")]
    trainer.model.zero_grad_buffer()
    total = sum(max(length - 1, 0) for length in micro.lengths)
    losses = []
    for document in micro.documents():
        length, tokens = document.numel(), document.to(trainer.device)
        mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=trainer.device).triu(1)
        labels = torch.cat([tokens[1:], tokens.new_zeros(1)])
        positions = torch.arange(length, device=trainer.device)
        loss = trainer.model(tokens[None], positions[None], mask, labels=labels[None])
        loss = loss.float().view(-1)[: length - 1]
        (loss.sum() / total).backward()
        losses.append(loss.detach())
    return torch.cat(losses), Step(losses=[], grads=grads(trainer.chunk))


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert not ours.isnan().any(), what
    error = (ours.double() - theirs.double()).abs().max()
    assert error <= BOUND * theirs.double().abs().max(), f"{what} is off by {error:.2e}"


@pytest.mark.parametrize(("micro", "query_groups", "eager"), CASES)
def test_each_document_alone_in_stock_megatron_has_the_packs_losses_and_gradients(
    micro: Micro, query_groups: int | None, eager: dict[str, int], install: Install
) -> None:
    options = dataclasses.replace(OPTIONS, query_groups=query_groups)
    install()
    trainer = Trainer(options)
    taken = weights(trainer.chunk)
    packed = step(trainer, [micro], update=False, times=2)
    assert report_of(trainer)["eager"] == eager
    megagraph.uninstall()
    losses, alone = _one_by_one(options, taken, micro)
    valid = packed.losses[0][micro.row_lists()[2].to(losses.device) > 0]
    _close(valid, losses, "the losses")
    assert packed.grads.keys() == alone.grads.keys()
    for name, grad in packed.grads.items():
        _close(grad, alone.grads[name], name)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphed"])
@pytest.mark.parametrize("padded", [None, (14, 24)], ids=["plain", "padded"])
def test_nan_in_the_rows_past_the_pack_changes_no_bit(eager: bool, padded: Any, trainer: Trainer) -> None:
    poison = OPTIONS.vocab - 1
    with torch.no_grad():
        trainer.chunk.embedding.word_embeddings.weight[poison] = float("nan")
    clean = Micro(lengths=(12, 23), padded=padded, tail=20)
    poisoned = dataclasses.replace(clean, tail_token=poison)
    assert poisoned.row_lists()[0].eq(poison).sum() == 20
    for _ in range(2):
        steps = [step(trainer, [micro], update=False, eager=eager) for micro in (clean, poisoned)]
        assert_same_bits(*steps)
        assert not any(grad.isnan().any() for one in steps for grad in one.grads.values())
    assert report_of(trainer)["replays"] == (0 if eager else 3 * LAYERS)


# -- norms of the specs without Transformer Engine ----------------------------------------------------


def block_spec(**arguments: Any) -> Any:
    return megagraph.get_gpt_block_varlen_spec(transformer_config(OPTIONS), **arguments)


def test_layers_of_a_block_are_as_the_config_says() -> None:
    """Bug: they were dense, and without norms of queries and keys, unless arguments said it once more."""
    config = transformer_config(OPTIONS, num_moe_experts=2, qk_layernorm=True, add_bias_linear=False)
    no_norm = {"qk_layernorm": False}, IdentityOp
    for frequency, (given, norm) in ((1, ({}, Norm)), (2, ({}, Norm)), ([0, 1], no_norm)):
        config.moe_layer_freq = frequency
        whole = megagraph.get_gpt_block_varlen_spec(config, **given).layer_specs
        config.pipeline_model_parallel_size = 2
        last = megagraph.get_gpt_block_varlen_spec(config, pp_rank=1, **given).layer_specs
        config.pipeline_model_parallel_size = 1
        have_experts = ["MoELayer" in str(layer.submodules.mlp) for layer in (*whole, *last)]
        assert have_experts == [frequency != [0, 1], frequency != 2, frequency != 2]
        assert last[0].submodules.self_attention.submodules.q_layernorm is norm


def test_a_pattern_of_other_layers_is_refused_by_name() -> None:
    """Bug: the block had as many layers as the pattern has entries."""
    config = transformer_config(OPTIONS, num_moe_experts=2, add_bias_linear=False)
    config.moe_layer_freq = [1]
    with pytest.raises(ValueError, match=r"^moe_layer_freq: expected 2 entries, one a layer, got \[1\]$"):
        megagraph.get_gpt_block_varlen_spec(config)


def test_which_norms_are_ours_and_that_another_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries and keys; another one as where Apex is installed."""
    attention = megagraph.get_gpt_layer_varlen_spec(qk_l2_norm=True).submodules.self_attention.submodules
    assert attention.q_layernorm is attention.k_layernorm is L2Norm
    spec = megagraph.get_gpt_layer_varlen_spec(multi_latent_attention=True, qk_layernorm=True)
    attention = spec.submodules.self_attention.submodules
    assert attention.q_layernorm is attention.kv_layernorm is Norm

    monkeypatch.setattr(backends, "LNImpl", nn.Identity)
    submodules = megagraph.get_gpt_layer_varlen_spec(qk_layernorm=True).submodules
    assert submodules.input_layernorm is submodules.pre_mlp_layernorm is nn.Identity
    assert submodules.self_attention.submodules.q_layernorm is block_spec().layer_norm is nn.Identity


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="its norm is taken")
@pytest.mark.parametrize(("normalization", "qk_layernorm"), [("LayerNorm", False), ("RMSNorm", True)])
def test_norms_are_ours_with_bits_and_checkpoints_of_cores(normalization: str, qk_layernorm: bool) -> None:
    """The block spec brings the final norm, too."""
    given = {"normalization": normalization, "qk_layernorm": qk_layernorm}
    qk = {"q_layernorm": Norm, "k_layernorm": Norm} if qk_layernorm else {}
    ours = {"input_layernorm": Norm, "pre_mlp_layernorm": Norm, **qk}
    left, names = list[list[Step]](), list[list[str]]()
    stock = stock_spec(**given)
    stock.submodules.self_attention.submodules.core_attention = VarlenAttention
    for spec, final in (
        (stock, None),
        (megagraph.get_gpt_layer_varlen_spec(**given), getattr(nn, normalization)),
        (block_spec(**given), Norm),
    ):
        trainer = Trainer(OPTIONS, config=given, spec=spec)
        modules = {name.split(".")[-1]: type(it) for name, it in trainer.chunk.named_modules()}
        norms = {name: it for name, it in modules.items() if it in (Norm, nn.LayerNorm, nn.RMSNorm)}
        assert final is None or norms == {**ours, "final_layernorm": final}
        assert len(trainer.chunk.decoder.layers) == LAYERS
        names.append(list(trainer.chunk.state_dict()))
        left.append([step(trainer, [ONE, TWO]) for _ in range(2)])
    assert names[0] == names[1] == names[2]
    for steps in left[1:]:
        assert_same_bits(left[0], steps)
