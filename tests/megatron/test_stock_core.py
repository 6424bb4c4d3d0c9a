# SPDX-License-Identifier: Apache-2.0
"""Against what we did not write: megatron-core's own attention, RoPE and loop, one document at a time."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from megatron_rig import LAYERS, OPTIONS, Install, Micro, Step, grads, report_of, step, weights
from same_bits import assert_same_bits
from torch import Tensor

import megagraph
from megagraph.demo.trainer import ModelOptions, Trainer

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


@pytest.fixture(autouse=True)
def no_random_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock attention asks for a random stream of the GPU, to drop out nothing."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda tracker: nullcontext())


def _stock_spec() -> object:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec()


def _one_by_one(options: ModelOptions, taken: dict[str, Tensor], micro: Micro) -> tuple[Tensor, Step]:
    """Each document alone, unpacked, through Megatron's own modules. Losses are document after document."""
    assert not megagraph.reports()
    trainer = Trainer(options, spec=_stock_spec())
    missing = trainer.chunk.load_state_dict(taken, strict=False)
    assert not [name for name in missing.missing_keys if not name.endswith("_extra_state")]
    trainer.model.zero_grad_buffer()
    total = sum(max(length - 1, 0) for length in micro.lengths)
    losses = []
    for document in micro.documents():
        length, tokens = document.numel(), document.to(trainer.device)
        mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=trainer.device).triu(1)
        labels = torch.cat([tokens[1:], tokens.new_zeros(1)])
        loss = trainer.model(
            input_ids=tokens[None],
            position_ids=torch.arange(length, device=trainer.device)[None],
            attention_mask=mask,
            labels=labels[None],
        )
        loss = loss.float().view(-1)[: length - 1]
        (loss.sum() / total).backward()
        losses.append(loss.detach())
    return torch.cat(losses), Step(losses=[], grads=grads(trainer.chunk))


def _valid(losses: Tensor, micro: Micro) -> Tensor:
    return losses[micro.row_lists()[2].to(losses.device) > 0]


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert not ours.isnan().any(), what
    error = (ours.double() - theirs.double()).abs().max()
    assert error <= BOUND * theirs.double().abs().max(), f"{what} is off by {error:.2e}"


CASES = [
    *((micro, None, {"WARMING_UP": LAYERS}) for micro in PACKS),
    (PACKS[0], 1, {"WARMING_UP": LAYERS}),
    (Micro(lengths=(30, 29, 20)), None, {"TOO_MANY_TOKENS": 2 * LAYERS}),
]


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
    _close(_valid(packed.losses[0], micro), losses, "the losses")
    assert packed.grads.keys() == alone.grads.keys()
    for name, grad in packed.grads.items():
        _close(grad, alone.grads[name], name)


def test_the_model_sees_its_documents_and_their_order(trainer: Trainer) -> None:
    """Without this, the comparisons above could pass on a model that ignores its context."""
    one, two = (
        step(trainer, [Micro(lengths=lengths)], update=False).losses[0] for lengths in ((40,), (20, 20))
    )
    assert torch.equal(one[:19], two[:19])
    assert (one[20:39] - two[20:39]).abs().max() > 1e-3


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphed"])
def test_another_documents_tokens_change_no_bit_of_a_documents_losses(eager: bool, trainer: Trainer) -> None:
    micro = Micro(lengths=(11, 17, 6, 25))
    before = step(trainer, [micro], update=False, eager=eager, times=2).losses[0]
    original = micro.documents()

    class Changed(Micro):
        def documents(self) -> list[Tensor]:
            return [original[0], original[1].flip(0).add(1) % 60, *original[2:]]

    after = step(trainer, [Changed(lengths=micro.lengths)], update=False, eager=eager).losses[0]
    assert torch.equal(before[:11], after[:11]) and torch.equal(before[28:], after[28:])
    assert not torch.equal(before[11:28], after[11:28])
    assert report_of(trainer)["replays"] == (0 if eager else 2 * LAYERS)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphed"])
@pytest.mark.parametrize("padded", [None, (14, 24)], ids=["plain", "padded"])
def test_nan_in_the_rows_past_the_pack_changes_no_bit(
    eager: bool, padded: tuple[int, int] | None, trainer: Trainer
) -> None:
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
