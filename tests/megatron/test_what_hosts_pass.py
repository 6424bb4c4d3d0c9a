# SPDX-License-Identifier: Apache-2.0
"""What hosts pass to a model beside a plain pack is kept, or the call runs eager as it was given."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from megatron_rig import (
    LAYERS,
    ONE,
    OPTIONS,
    Install,
    Micro,
    Pair,
    eager_since,
    forward,
    report_of,
    schedule,
    step,
)
from torch import Tensor, distributed, nn

import megagraph
from megagraph._C import Constants
from megagraph.demo.trainer import Trainer, gpt_model, in_half_precision, transformer_config

pytestmark = pytest.mark.both


def trained(install: Install, **changes: Any) -> Trainer:
    """A model whose training and forward-only kinds are captured."""
    install(**changes)
    trainer = Trainer(OPTIONS)
    for _ in range(3):
        step(trainer, [ONE], update=False)
        with torch.no_grad():
            forward(trainer.model, ONE, trainer.device)
    return trainer


@torch.no_grad()
def call(trainer: Trainer, *, params: Any = None, **arguments: Any) -> Any:
    tokens, labels, _mask, positions = (rows[None].to(trainer.device) for rows in ONE.row_lists())
    given = {"attention_mask": None, "labels": labels, **arguments}
    return trainer.chunk(
        input_ids=tokens,
        position_ids=positions,
        packed_seq_params=ONE.params(trainer.device) if params is None else params,
        **given,
    )


def given_to(module: Any) -> list[dict[str, Any]]:
    """What calls of a module are given by name from now on."""
    seen: list[dict[str, Any]] = []
    module.register_forward_pre_hook(lambda _module, _args, given: seen.append(given), with_kwargs=True)
    return seen


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_mask_beside_a_pack_reaches_the_layers(install: Install, mode: str) -> None:
    """Bug: the mask was dropped without a reason, in both modes, so that no comparison showed it."""
    trainer = trained(install, mode=mode)
    before = report_of(trainer)
    mask = torch.zeros(1, 1, ONE.physical, ONE.physical, dtype=torch.bool, device=trainer.device)
    seen = given_to(trainer.chunk.decoder.layers[0])
    call(trainer, attention_mask=mask)
    assert [given["attention_mask"] is mask for given in seen] == [True]
    assert eager_since(report_of(trainer), before) == {"SIGNATURE_CHANGED": LAYERS}


@pytest.mark.parametrize("field", ["local_cp_size", "cp_group"])
def test_a_pack_with_a_context_parallel_group_of_its_own_runs_as_given(install: Install, field: str) -> None:
    """Bug: both fields were dropped, so that a rank attended to its own share of the pack alone."""
    trainer = trained(install)
    before = report_of(trainer)
    given = 2 if field == "local_cp_size" else distributed.group.WORLD
    params = dataclasses.replace(ONE.params(trainer.device), **{field: given})
    if field == "local_cp_size":
        with pytest.raises(ValueError, match="expected a cp_group of local_cp_size 2, got none"):
            call(trainer, params=params)
    else:
        call(trainer, params=params)
    assert eager_since(report_of(trainer), before) == {"CP_SIZE_NOT_CAPTURED": LAYERS}


def test_a_field_that_dense_layers_do_not_read_changes_nothing(install: Install) -> None:
    """`tokens_per_sample` is for a loss of experts; test_seq_idx.py has the other new fields."""
    trainer = trained(install)
    params = ONE.params(trainer.device)
    if not hasattr(params, "tokens_per_sample"):
        pytest.skip("this release of megatron-core has no tokens_per_sample")
    before = report_of(trainer)["replays"]
    expected = call(trainer).clone()
    given = dataclasses.replace(params, tokens_per_sample=ONE.physical)
    assert torch.equal(call(trainer, params=given), expected)
    assert report_of(trainer)["replays"] == before + 2 * LAYERS


def test_what_others_set_on_a_pack_is_on_the_pack_that_the_model_sees(install: Install) -> None:
    """Bug: the canonical pack was made of the class's fields alone."""
    trainer = trained(install)
    before = report_of(trainer)["replays"]
    params = ONE.params(trainer.device)
    params.seq_lens = [9, 20]
    seen = given_to(trainer.chunk.decoder)
    call(trainer, params=params)
    assert report_of(trainer)["replays"] == before + LAYERS
    (given,) = seen
    assert given["packed_seq_params"] is not params and given["packed_seq_params"].seq_lens == [9, 20]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OtherMicro(Micro):
    """One whose pack is of a class of the host's, which is not made of a pack's fields alone."""

    def params(self, device: torch.device) -> Any:
        plain = super().params(device)

        class Other(type(plain)):  # type: ignore[misc]
            def __init__(self, further: str, **fields: Any) -> None:
                super().__init__(**fields)
                self.further = further

        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return Other("a host's", **fields)


def test_a_pack_that_no_graph_takes_says_nothing_of_those_that_are_captured(pair: Pair) -> None:
    """Bug: graphs were captured for packs of its class, which could not be made."""
    pair.step(ONE, _OtherMicro(lengths=(4,) * 9), times=3)
    pair.ran(2 * LAYERS, WARMING_UP=LAYERS, TOO_MANY_SEQUENCES=3 * LAYERS)


def test_layers_that_a_caller_wants_to_see_run_eager(pair: Pair) -> None:
    """Bug: `extract_layer_indices` ended in an AttributeError."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    forward_of_block = inspect.unwrap(TransformerBlock.forward)
    if "extract_layer_indices" not in inspect.signature(forward_of_block).parameters:
        pytest.skip("this release of megatron-core has no extract_layer_indices")
    pair.step(ONE, times=4)
    before = pair.report()
    seen: list[list[Tensor]] = []
    for trainer in pair.both:
        found: list[Tensor] = []

        def keep(_block: Any, _args: Any, out: Any, found: list[Tensor] = found) -> Any:
            if isinstance(out, tuple):
                found += [out[0], *out[1]]
                return out[0]
            return out

        handle = trainer.chunk.decoder.register_forward_hook(keep)
        call(trainer, extra_block_kwargs={"extract_layer_indices": {0}})
        handle.remove()  # Megatron's rows have a history even here: the model would keep itself in memory
        seen.append(found)
    eager, graphed = seen
    assert len(eager) == len(graphed) == 2
    assert all(map(torch.equal, eager, graphed))
    assert eager_since(pair.report(), before) == {"SIGNATURE_CHANGED": LAYERS}


def test_a_table_that_equalled_the_captures_is_compared_again_once_either_is_written() -> None:
    """Bug: it was known by identity: with other frequencies in the same memory the old ones replayed."""
    captured = torch.linspace(0, 1, 8)
    constants = Constants({"rotary_pos_emb": captured})
    own = captured.clone()
    for value, factor, is_same in ((None, 1, True), (own, 2, False), (captured, 2, True), (own, 0.5, False)):
        if value is not None:
            value.mul_(factor)
        assert constants.are({"rotary_pos_emb": own}) is is_same
        assert constants.are({"rotary_pos_emb": own}) is is_same  # by what is known
        assert constants.are({"rotary_pos_emb": captured})


class _Around(nn.Module):
    """A wrapper of a host's, around one model or another."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module, self.config = model, model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def set_input_tensor(self, tensor: Any) -> None:
        self.module.set_input_tensor(tensor)


def test_a_model_that_takes_another_ones_place_in_a_wrapper_is_captured(install: Install) -> None:
    """Bug: what a wrapper holds was looked up once; the next model was a guest in its own steps."""
    install(cuda_graph_warmup_steps=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models: list[Any] = [
        in_half_precision(gpt_model(OPTIONS, transformer_config(OPTIONS)).to(device)).eval() for _ in range(2)
    ]
    around = _Around(models[0])
    for model in models:
        around.module = model
        for _ in range(3):
            with torch.no_grad():
                schedule(around, [ONE], 1, device, forward_only=True)
    assert [report["replays"] for report in megagraph.reports()] == [2 * LAYERS, 2 * LAYERS]
