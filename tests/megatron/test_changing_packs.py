# SPDX-License-Identifier: Apache-2.0
"""A training on packs that change every micro-batch has the bits of the same run without graphs."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import megatron_rig as rig
import pytest
import torch
from megatron_rig import CAPACITY, LAYERS, Micro, Pair, Step, forward, grads
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph._C import Capacity
from megagraph.demo.trainer import Trainer
from megagraph.packs.ops import TailConvention

STEPS, MICROS, WARM_UP = 32 if rig.ON_GPU else 10, 3, 2
SMALL = Capacity(tokens=64, num_seqs=4, max_seqlen=48)
MAIN: dict[str, Any] = {"capacities": (SMALL,), "cuda_graph_warmup_steps": WARM_UP}
MICRO = Micro(lengths=(9, 20), tail=7)
END = sum(MICRO.lengths)


def _cut(rng: random.Random, tokens: int, documents: int) -> tuple[int, ...]:
    cuts = sorted(rng.sample(range(1, tokens), documents - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


def _job(steps: int = STEPS, *, seed: int = 0, misfits: float = 0.3) -> list[list[rig.Micro]]:
    """Packs that all differ; a share of `misfits` is too large, each kind as often."""
    rng = random.Random(seed)

    def lengths() -> tuple[int, ...]:
        if rng.random() < misfits:
            too_large = (
                lambda: _cut(rng, rng.randint(65, 80), 3),
                lambda: _cut(rng, rng.randint(20, 64), rng.randint(5, 6)),
                lambda: (rng.randint(49, 60), 2),
            )
            return rng.choice(too_large)()
        while max(found := _cut(rng, rng.randint(6, 64), rng.randint(1, 4))) > SMALL.max_seqlen:
            pass
        return found

    return [
        [rig.Micro(lengths=lengths(), seed=rng.randrange(1 << 30)) for _ in range(MICROS)]
        for _ in range(steps)
    ]


def _eager_reason(micro: rig.Micro) -> str | None:
    """By hand: why a pack does not fit `SMALL`."""
    sizes = {"TOO_MANY_TOKENS": (micro.physical, 64), "TOO_MANY_SEQUENCES": (len(micro.lengths), 4)}
    sizes["SEQUENCE_TOO_LONG"] = micro.longest, 48
    return next((reason for reason, (size, most) in sizes.items() if size > most), None)


def test_every_call_has_the_bits_of_eager_and_replays_or_has_the_reason_that_a_hand_count_gives() -> None:
    graphed = rig.compare_runs(_job(), plugin=MAIN)
    expected: Counter[str] = Counter()
    for index, micros in enumerate(_job()):
        for micro in micros:
            why = _eager_reason(micro) or ("WARMING_UP" if index < WARM_UP else "replays")
            expected[why] += rig.LAYERS
    replays = expected.pop("replays")
    calls, graphs = STEPS * MICROS * rig.LAYERS, 2 * rig.LAYERS
    assert rig.ran(graphed.report, replays, calls=calls, graphs=graphs, **expected)["replays"] > 0
    replayed = [m for micros in _job()[WARM_UP:] for m in micros if _eager_reason(m) is None]
    assert graphed.report["padding_share"] == _share(replayed)
    assert set(expected) == {"WARMING_UP", "TOO_MANY_TOKENS", "TOO_MANY_SEQUENCES", "SEQUENCE_TOO_LONG"}


def test_capacities_learned_from_the_warm_up_hold_what_was_seen_there_in_eager_mode_too() -> None:
    steps, config = _job(7, seed=2, misfits=0.0), {**MAIN, "capacities": ()}
    run, eager = (rig.train(rig.graph_config(mode=mode, **config), steps) for mode in ("graph", "eager"))
    assert_same_bits(run, eager)
    learned = run.report["capacities"]
    assert eager.report["capacities"] == learned and eager.report["replays"] == 0
    warm_up = [micro for micros in steps[:WARM_UP] for micro in micros]
    # As the schedule was told, whose seq_length none of these packs has.
    assert max(micro.physical for micro in warm_up) < rig.OPTIONS.max_tokens
    assert {c["tokens"] for c in learned} == {rig.OPTIONS.max_tokens}

    def fits(micro: rig.Micro) -> bool:
        sizes = {"tokens": micro.physical, "num_seqs": len(micro.lengths), "max_seqlen": micro.longest}
        return any(all(size <= most[name] for name, size in sizes.items()) for most in learned)

    assert all(map(fits, warm_up))
    later = [micro for micros in steps[WARM_UP:] for micro in micros]
    assert run.report["replays"] == rig.LAYERS * sum(map(fits, later)) > 0
    assert run.report["eager"]["WARMING_UP"] == rig.LAYERS * len(warm_up)


@pytest.mark.parametrize("evaluations", [1, 21])
def test_evaluations_alone_teach_capacities_only_where_nobody_trains(evaluations: int) -> None:
    """Bugs: the first one did, whose packs were smaller than those of the training behind it; many did so for
    good, so that training never replayed."""
    pair, small = rig.Pair(plugin={"capacities": ()}), rig.Micro(lengths=(16,))
    for _ in range(evaluations):
        pair.evaluate(small)
    assert bool(pair.report()["replays"]) == (evaluations > 1)
    pair.step(rig.ONE, times=3)
    report = pair.report()
    fewest, replays = min(each["num_seqs"] for each in report["capacities"]), report["replays"]
    assert fewest == len(rig.ONE.lengths)
    pair.step(rig.TWO, rig.OTHER, times=2)
    assert pair.report()["replays"] == replays + 2 * 2 * rig.LAYERS


def test_more_than_one_misfit_in_twenty_packs_is_told_once(install: rig.Install, caplog: Any) -> None:
    install(log_interval=20)
    trainer, misfit = Trainer(rig.OPTIONS), rig.Micro(lengths=(5,) * 7)
    for misfits in (0, 1, 2, 2):  # of twenty
        rig.step(trainer, [rig.ONE], times=20 - misfits)
        rig.step(trainer, [misfit], times=misfits)
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith("GPTModel: 10 % of layer calls of steps 41-60 ran eager, since no capacity holds")
    assert "7 documents" in said


# Of each form in each step: plain, padded, padded with a tail, with a tail alone.
FORMS = [
    [
        rig.Micro(lengths=(5 + i, 7, 20 - i), seed=i),
        rig.Micro(lengths=(5 + i, 7, 20), padded=(8 + i, 8, 24), seed=i),
        rig.Micro(lengths=(9, 11 + i), padded=(12, 24), tail=4, seed=-i),
        rig.Micro(lengths=(30 + i,), tail=34 - i),
    ]
    for i in range(3)
]


def test_every_tail_convention_and_form_of_pack_has_eager_bits() -> None:
    """And no loss that is another one's beyond rounding."""
    first, *_ = runs = [rig.compare_runs(FORMS, plugin={"tail": tail}) for tail in TailConvention]
    for run in runs:
        rig.ran(run.report, 2 * 4 * rig.LAYERS, WARMING_UP=4 * rig.LAYERS)
        for one, other in zip(first.steps[0].losses, run.steps[0].losses, strict=True):
            assert (one - other).abs().max() <= (2**-7 if rig.OPTIONS.bf16 else 1e-5) * one.abs().max()


def _share(replayed: Sequence[rig.Micro], tokens: int = rig.CAPACITY.tokens) -> object:
    """By hand: rows of the capacities that hold no valid token."""
    valid = sum(sum(micro.lengths) for micro in replayed)
    return pytest.approx(1 - valid / (tokens * len(replayed)), abs=1e-12)


@pytest.mark.parametrize("layer", [0, 1])
def test_tokens_count_once_however_many_layers_stay_eager(layer: int, install: rig.Install) -> None:
    """The others are replayed one by one; the first of them stages the pack, and counts it."""
    install()
    trainer = rig.ModelTrainer(layers=3)
    trainer.chunk.decoder.layers[layer].register_forward_hook(lambda *unused: None)
    rig.step(trainer, FORMS[0], times=3)
    report = rig.report_of(trainer)
    assert report["replays"] == 2 * 4 * 2 and report["eager"]["FOREIGN_HOOK"] == 2 * 4
    assert report["padding_share"] == _share(FORMS[0] * 2)


@pytest.mark.parametrize("make", [rig.ModelTrainer, rig.HybridTrainer], ids=["GPTModel", "HybridModel"])
def test_other_rotary_tables_than_those_of_the_capture_run_eager_and_count_no_token(make: rig.Make) -> None:
    """The call is refused after its slot was leased."""
    pair = rig.Pair(make)
    layers = len(pair.graphed.chunk.decoder.layers)
    pair.step(rig.ONE, times=2)
    before = pair.report()
    for trainer in pair.both:
        trainer.chunk.rotary_pos_emb.inv_freq.mul_(0.5)
        type(trainer.chunk.rotary_pos_emb).forward.cache_clear()
    pair.step(rig.ONE, rig.TWO)
    after = pair.ran(WARMING_UP=layers, SIGNATURE_CHANGED=2 * layers)
    assert after["replays"] == before["replays"] == layers
    assert after["padding_share"] == before["padding_share"] == _share([rig.ONE])


def _through_the_block(trainer: Trainer, filler: float) -> tuple[Tensor, Step]:
    """One pass whose gradient is `filler` past the pack's end; what the block gave and what it left."""
    outputs: list[Tensor] = []
    trainer.zero_grad()
    with trainer.chunk.decoder.register_forward_hook(lambda _module, _args, out: outputs.append(out)):
        losses, _ = forward(trainer.model, MICRO, trainer.device)
    (out,) = outputs
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    grad[END:] = filler
    torch.autograd.backward(out, grad)
    return out.detach().clone(), Step(losses=[losses.detach()], grads=grads(trainer.chunk))


def test_rows_past_the_packs_end_leave_as_zeros_and_no_gradient_of_theirs_comes_back(pair: Pair) -> None:
    for trainer in pair.both:
        # What was zero before the last norm is not zero after it.
        nn.init.constant_(trainer.chunk.decoder.final_layernorm.bias, 0.5)
        for layer in trainer.chunk.decoder.layers:
            nn.init.constant_(layer.mlp.linear_fc2.bias, 0.25)
        trainer.optimizer.reload_model_params()
    pair.step(MICRO, times=2)
    found = []
    for filler in (0.0, float("nan")):
        found += pair.each(partial(_through_the_block, filler=filler))
    for out, left in found:
        assert out.shape[0] == MICRO.physical
        assert out[:END].any() and torch.equal(out[END:], torch.zeros_like(out[END:]))
        assert_same_bits(out, found[0][0])
        assert_same_bits(left, found[0][1])
    assert pair.report()["replays"] == (1 + 2) * LAYERS


@pytest.mark.parametrize("tail", TailConvention)
@pytest.mark.parametrize("padded", [None, (12, 24)], ids=["plain", "padded"])
def test_no_gradient_that_a_layer_makes_past_the_packs_end_comes_back(tail: Any, padded: Any) -> None:
    """Bug: with `empty-dummy` graphs took the end of the buffer for the pack's."""

    def with_a_loss(hidden: Tensor) -> Tensor:
        """Of its own, which every row adds to."""
        (rows := hidden.view_as(hidden)).register_hook(lambda grad: grad + 1)
        return rows

    pair = Pair(plugin={"tail": tail, "capacities": (CAPACITY.replace(num_seqs=3),)})
    for trainer in pair.both:
        norm = trainer.chunk.decoder.layers[0].input_layernorm
        norm.forward = lambda hidden, plain=norm.forward: plain(with_a_loss(hidden))
    pair.step(dataclasses.replace(MICRO, padded=padded), times=3)
    assert pair.report()["replays"] == 2 * LAYERS
