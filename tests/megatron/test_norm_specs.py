# SPDX-License-Identifier: Apache-2.0
"""The specs without Transformer Engine: which norms they build, and that training keeps its bits."""

import importlib.util
from typing import Any

import pytest
from megatron_rig import LAYERS, ONE, OPTIONS, TWO, Step, step
from same_bits import assert_same_bits
from torch import nn

import megagraph
from megagraph.demo.trainer import Trainer, transformer_config
from megagraph.modules import Norm, VarlenAttention

cores_final_norm = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Megatron chooses Transformer Engine's final norm",
)
each_kind = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
each_qk = pytest.mark.parametrize("qk_layernorm", [False, True], ids=["no q and k norm", "q and k norm"])


def block_spec(**arguments: Any) -> Any:
    return megagraph.get_gpt_block_varlen_spec(transformer_config(OPTIONS), **arguments)


def stock_spec(**arguments: Any) -> Any:
    """Megatron's local spec with its own norms, and our core attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(**arguments)
    spec.submodules.self_attention.submodules.core_attention = VarlenAttention
    return spec


def norms(trainer: Trainer) -> dict[str, type[nn.Module]]:
    """The types of the norms that a model has, by the ends of their names."""
    kinds = (Norm, nn.LayerNorm, nn.RMSNorm)
    modules = trainer.chunk.named_modules()
    return {name.split(".")[-1]: type(module) for name, module in modules if isinstance(module, kinds)}


def test_which_norms_of_queries_and_keys_are_ours() -> None:
    from megatron.core.transformer.torch_norm import L2Norm

    attention = megagraph.get_gpt_layer_varlen_spec(qk_l2_norm=True).submodules.self_attention.submodules
    assert attention.q_layernorm is attention.k_layernorm is L2Norm
    spec = megagraph.get_gpt_layer_varlen_spec(multi_latent_attention=True, qk_layernorm=True)
    attention = spec.submodules.self_attention.submodules
    assert attention.q_layernorm is attention.kv_layernorm is Norm


def test_another_norm_of_the_local_spec_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Apex is installed."""
    from megatron.core.models import backends

    class Other(nn.Module):
        pass

    monkeypatch.setattr(backends, "LNImpl", Other)
    submodules = megagraph.get_gpt_layer_varlen_spec(qk_layernorm=True).submodules
    assert submodules.input_layernorm is submodules.pre_mlp_layernorm is Other
    assert submodules.self_attention.submodules.q_layernorm is Other
    assert block_spec().layer_norm is Other


@cores_final_norm
@each_kind
@each_qk
def test_every_norm_of_a_layer_is_ours_and_keeps_the_bits_and_the_checkpoints_of_cores(
    normalization: str, qk_layernorm: bool
) -> None:
    """The block spec brings the final norm, too."""
    given = {"normalization": normalization, "qk_layernorm": qk_layernorm}
    qk = {"q_layernorm": Norm, "k_layernorm": Norm} if qk_layernorm else {}
    ours = {"input_layernorm": Norm, "pre_mlp_layernorm": Norm, **qk}
    left: list[list[Step]] = []
    names: list[list[str]] = []
    for spec, final in (
        (stock_spec(**given), None),
        (megagraph.get_gpt_layer_varlen_spec(**given), getattr(nn, normalization)),
        (block_spec(**given), Norm),
    ):
        trainer = Trainer(OPTIONS, config=given, spec=spec)
        assert final is None or norms(trainer) == {**ours, "final_layernorm": final}
        assert len(trainer.chunk.decoder.layers) == LAYERS
        names.append(list(trainer.chunk.state_dict()))
        left.append([step(trainer, [ONE, TWO]) for _ in range(2)])
    assert names[0] == names[1] == names[2]
    for steps in left[1:]:
        assert_same_bits(left[0], steps)
