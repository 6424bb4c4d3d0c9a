# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism over two ranks: the bits of eager, and what happens where one rank cannot go on."""

import contextlib
import copy
import types
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import parallel_jobs
import pytest
import rope_rig
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel
from megatron.core.models.gpt import GPTModel
from same_bits import assert_same_bits
from streams import seeded
from test_masks import mlps_that_read_masks
from torch import Tensor, distributed
from worlds import World, on_ranks

import megagraph
from megagraph._C import Capacity
from megagraph.bank.capture import GAVE_UP, GroupGaveUp
from megagraph.demo.trainer import Trainer
from megagraph.megatron import parallel
from megagraph.megatron.graphs.verifying import found_anywhere
from megagraph.megatron.parallel.peers import HostGroup, Peers

LAYERS = 2
PER_STEP = parallel_jobs.PACKS * LAYERS
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}
SHARES: dict[str, Any] = {"sequence_parallel": True}
NOTHING = contextlib.nullcontext()
SHARED_ROWS = {**TENSOR_PARALLEL, **SHARES}

# What makes the models, and further options of Megatron's.
TRAININGS: dict[str, tuple[Any, dict[str, Any]]] = {
    # Bugs: the first pack reached Megatron's RoPE, which takes no rows behind the last document; the stream
    # was swapped in twice for the capture, and whoever drew a number was not captured.
    "shared rows, tails, dropout": (parallel_jobs.model, {**SHARES, "hidden_dropout": 0.1}),
    "MLA": (partial(rig.ModelTrainer, mla="plain, RoPE"), SHARES),
    "MLA, fused RoPE": (partial(rig.ModelTrainer, mla="low rank, YaRN"), {"apply_rope_fusion": True}),
}
# By reason: what is done to a rank before one of its steps.
NOTICED = {
    **{"DISABLED": "skip", "SUSPENDED": "suspend", "STATE_CHANGED": "state", "NUMERICS_CHANGED": "precision"},
    # The first two would make its micro-batches eager one by one.
    **{"SIGNATURE_CHANGED": "mode", "RECOMPUTING": "hooks", "ADDRESS_MOVED": "address"},
}
# What rank 0 does before which steps, and what it then runs eager. As much is on the other one.
DISAGREEING: dict[str, tuple[dict[int, str], dict[str, int]]] = {
    # A layer that it cannot capture is eager on both, from the first replayed step on.
    "a capture": ({0: "capture"}, {"CAPTURE_FAILED": PER_STEP // 2}),
    "a verification": ({0: "wrong"}, {"VERIFY_FAILED": PER_STEP // 2}),
    "a hook": ({0: "hook"}, {"FOREIGN_HOOK": PER_STEP // 2}),
    # Different graphs in the end: none is used.
    "other graphs": ({1: "sealed"}, {"GROUP_DISAGREED": 2 * PER_STEP}),
    # Outside of any layer: every layer is. A pack then runs as given, also where one rank skips no graph.
    "all": ({0: "give up", 2: "skip"}, {"CAPTURE_FAILED": 2 * PER_STEP, "DISABLED": PER_STEP}),
    # A group of its own that it destroys is nobody else's business.
    "steps": (dict(enumerate(("group", *NOTICED.values()), 2)), dict.fromkeys(NOTICED, PER_STEP)),
}
NOTE = "of nobody's"
WHY = {"note": r"STATE_CHANGED; changed: layer 1.mlp: note nothing -> \"of nobody's\"", "skip": "DISABLED"}


@pytest.mark.parametrize("name", TRAININGS)
def test_bits(world2: World, name: str) -> None:
    """With an evaluation before each step."""
    make, options = TRAININGS[name]
    given = {"make": make, "config": {**TENSOR_PARALLEL, **options}, "evaluate_at": (0, 1)}
    if "tails" in name:
        given["steps_of"] = parallel_jobs.steps_with_tails
    for report in world2.run(parallel_jobs.train_pair, tensor_parallel=2, **given):
        rig.ran(report, 2 * PER_STEP, WARMING_UP=2 * PER_STEP)


def test_rows_that_were_padded_for_one_capacity_are_no_example_of_another(world2: World) -> None:
    """Under sequence parallelism a micro-batch has its capacity's rows where the layers see it."""
    small, large = (Capacity(tokens=tokens, num_seqs=5, max_seqlen=64) for tokens in (64, 128))
    given = {"config": SHARED_ROWS, "plugin": {"capacities": (small, large)}}
    for report in world2.run(parallel_jobs.train_pair, tensor_parallel=2, **given):
        figures = rig.ran(report, verified=1, unverified=1, WARMING_UP=PER_STEP)["verification"]
        assert [it["variant"] for it in figures["unverified_sites"]] == [f"training, {large}"] * LAYERS
        assert {it["why"] for it in figures["unverified_sites"]} == {"no micro-batch that fits was kept"}


def disagreeing(world: World, how: dict[int, str], **given: Any) -> list[dict[str, Any]]:
    """The reports of a training in which rank 0 alone does something before some steps."""
    return world.run(parallel_jobs.disagree, tensor_parallel=2, how=how, config=TENSOR_PARALLEL, **given)


@pytest.mark.parametrize("name", DISAGREEING)
def test_what_one_rank_cannot_do_none_does(world2: World, name: str) -> None:
    """In the same step, with the bits of eager."""
    how, here = DISAGREEING[name]
    steps, there = 2 + max(how), {"GROUP_DISAGREED": sum(here.values())}
    reports = disagreeing(world2, how, num_steps=steps)
    for report, expected in zip(reports, (here, there), strict=True):
        assert report["eager"] == {"WARMING_UP": PER_STEP, **expected}
        assert report["calls"] == steps * PER_STEP


def test_a_state_that_is_another_ranks_is_not_put_down_to_numeric_settings_alone(world2: World) -> None:
    reports = disagreeing(world2, dict.fromkeys((2, 3), "state"), num_steps=4)
    found = [report["states"][1] for report in reports]
    assert NOTE in found[0] and found[1] == "the numeric settings or another rank's state"


@on_ranks(2, tensor_parallel=2)
def test_a_second_micro_batch_in_flight_runs_eager_on_every_rank() -> None:
    """Bug: it was an error, since graphs with collectives let no rank run eager alone."""
    *steps, micros = parallel_jobs.small_steps(3)

    def in_flight(trainer: Trainer) -> tuple[list[Tensor], dict[str, Tensor]]:
        trainer.zero_grad()
        losses = [rig.forward(trainer.model, micro, trainer.device)[0] for micro in micros]
        for of_micro in losses:
            of_micro.sum().backward()
        return [of_micro.detach().clone() for of_micro in losses], rig.grads(trainer.chunk)

    pair = rig.Pair(seeded(parallel_jobs.model), config=SHARED_ROWS)
    pair.train(steps)
    assert_same_bits(*pair.each(in_flight))
    pair.ran(PER_STEP + LAYERS, WARMING_UP=PER_STEP, NO_FREE_SLOT=LAYERS)


def test_gradients_that_move_on_one_rank_cost_evaluation_its_graphs_on_none(world2: World) -> None:
    reports = disagreeing(world2, {2: "gradients"}, num_steps=4, evaluate_at=(1, 2, 3))
    for report, reason in zip(reports, ("ADDRESS_MOVED", "GROUP_DISAGREED"), strict=True):
        rig.ran(report, graphs=(2 + 1) * LAYERS, WARMING_UP=2 * PER_STEP, **{reason: PER_STEP})


def trained(*, met: bool = False, times: int = 2) -> tuple[Trainer, Any, Sequence[rig.Micro]]:
    """A model that has graphs, and what may hold a note: with graphs for it, too, if it has `met` it."""
    megagraph.install(rig.graph_config())
    trainer = Trainer(parallel_jobs.OPTIONS, config=TENSOR_PARALLEL)
    (micros,) = parallel_jobs.small_steps(1)
    holder = trainer.chunk.decoder.layers[1].mlp
    rig.step(trainer, micros, times=times)
    if met:
        holder.note = NOTE
        rig.step(trainer, micros, times=2)
        del holder.note
        rig.step(trainer, micros)
    trainer.zero_grad()  # or their `.grad` keeps micro-batches eager
    return trainer, holder, micros


@pytest.mark.parametrize("how", WHY)
@on_ranks(2, tensor_parallel=2)
def test_what_keeps_one_rank_alone_eager_inside_of_a_step_is_an_error_that_names_it(how: str) -> None:
    """At once if the other rank is elsewhere, else after a moment. Bug: others waited in collectives."""
    trainer, holder, micros = trained()
    rank, left = distributed.get_rank(), len(micros)
    soon = mock.patch.object(parallel.peers, "patience_of_job", lambda: timedelta(seconds=1))

    def forward_step(data: Iterator[rig.Micro], chunk: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and how == "note":
            holder.note = NOTE
        with megagraph.disable_cuda_graphs_this_step() if left == 0 and how == "skip" else NOTHING:
            return rig.forward(chunk, next(data), trainer.device)

    if rank == 1:  # whose graphs would wait
        rig.schedule(trainer.model, micros, left - 1, trainer.device)
        tokens, _, _, positions = micros[-1].row_lists()
        trainer.chunk.embedding(tokens[None].to(trainer.device), positions[None].to(trainer.device))
        if how == "skip":  # while its device waits, in its next micro-batch
            (graphs,) = rig.the_plugin().all_graphs()
            said = r"^rank 1 has to run site 0 of one eager \(why\), and other"
            with pytest.raises(RuntimeError, match=said):
                graphs.peers.run_eager_alike(left + 1, 0, 0, "why")
        return
    others = "other ranks that share the pack do not"
    said = rf"^rank 0 has to run a micro-batch eager \({WHY[how]}\), and {others}"
    with soon, pytest.raises(RuntimeError, match=said):
        rig.run_schedule(trainer.model, forward_step, micros, left)


@on_ranks(2, tensor_parallel=2)
def test_a_layer_that_a_block_of_a_host_calls_otherwise_is_asked_for() -> None:
    """By one rank, or by both. Bug: it ran eager, on rows of its own, while others replayed."""
    asked: list[Any] = []

    class OtherwiseBlock(OwnBlock):
        calls_otherwise = False

        def further_arguments(self, index: int) -> dict[str, Any]:
            """Its second layer is called with what nobody reads in training."""
            return {"context_mask": 0} if index and self.calls_otherwise else {}

    with mock.patch.object(Peers, "run_eager_alike", lambda _peers, *where: asked.append(where)):
        megagraph.install(rig.graph_config())
        make = partial(HostTrainer, OwnModel, OtherwiseBlock, options=parallel_jobs.OPTIONS)
        trainer, micros = make(config=TENSOR_PARALLEL), [rig.Micro(lengths=(40, 24))] * 2
        rig.step(trainer, micros, times=3)
        expected = rig.step(trainer, micros, update=False)
        for ranks in ({0}, {0, 1}):
            before, is_other = rig.report_of(trainer), distributed.get_rank() in ranks
            OtherwiseBlock.calls_otherwise = is_other
            assert_same_bits(rig.step(trainer, micros, update=False), expected)
            assert asked == [(number, 0, -3, "SIGNATURE_CHANGED") for number in (1, 2) if is_other]
            asked.clear()
            eager = rig.eager_since(rig.report_of(trainer), before)
            assert eager == ({"SIGNATURE_CHANGED": len(micros)} if is_other else {})


@on_ranks(2, tensor_parallel=2)
def test_a_rank_in_inference_mode_runs_the_rows_of_others_that_only_record_no_gradients() -> None:
    """Bug: it ran the rows that were given, beside collectives of as many as a capacity has."""
    trainer, _, micros = trained()

    def losses(mode: Any) -> list[Tensor]:
        with mode():
            return [rig.forward(trainer.model, it, trainer.device)[0].clone() for it in micros]

    is_first, counts = distributed.get_rank() == 0, len(micros) * LAYERS
    expected, before = [losses(torch.no_grad) for _ in range(2)][-1], rig.report_of(trainer)
    for mode in (torch.inference_mode if is_first else torch.no_grad, torch.inference_mode, torch.no_grad):
        assert_same_bits(losses(mode), expected)
    apart = {} if is_first else {"GROUP_DISAGREED": counts}
    eager = rig.eager_since(rig.report_of(trainer), before)
    assert eager == {**apart, "SIGNATURE_CHANGED": (1 + is_first) * counts}
    assert rig.report_of(trainer)["replays"] == before["replays"] + counts
    rig.step(trainer, micros)


@on_ranks(2, tensor_parallel=2)
def test_what_one_rank_alone_wants_graphs_for_does_not_keep_all_from_others() -> None:
    """Bug: as long as it did nothing was captured. What runs in inference mode has no graphs."""
    trainer, _, micros = trained()
    with torch.no_grad() if distributed.get_rank() else torch.inference_mode():
        rig.forward(trainer.model, micros[0], trainer.device)
    weight = trainer.chunk.decoder.layers[0].mlp.linear_fc1.weight
    weight.data = weight.data.clone()  # so that all that has occurred is due again
    before = rig.report_of(trainer)
    rig.step(trainer, micros, times=2)
    after, calls = rig.report_of(trainer), len(micros) * LAYERS
    assert rig.eager_since(after, before) == {"ADDRESS_MOVED": calls}
    assert after["replays"] == before["replays"] + calls


@on_ranks(2, tensor_parallel=2)
def test_a_gradient_that_one_rank_has_beside_main_grad_is_none_of_new_graphs_first_step() -> None:
    """Bug: ranks captured in that step, and this one found it at its first call, while the other replayed."""
    trainer, _, micros = trained(times=1)
    if distributed.get_rank():
        weight = trainer.chunk.decoder.layers[0].mlp.linear_fc1.weight
        weight.grad = torch.zeros_like(weight)
    rig.schedule(trainer.model, micros, len(micros), trainer.device)
    rig.step(trainer, micros)
    rig.ran(rig.report_of(trainer), PER_STEP, verified=1, WARMING_UP=2 * PER_STEP)


@pytest.mark.parametrize("how", ["note", "layer"])
@on_ranks(2, tensor_parallel=2)
def test_a_change_inside_a_step_on_one_rank_to_what_has_graphs_is_one_before_the_next_step(how: str) -> None:
    """Bug: a rank with another layer had dropped its graphs by then, trained on, and the other one waited."""
    trainer, holder, micros = trained(met=True)
    layers = trainer.chunk.decoder.layers

    def changing() -> Iterator[rig.Micro]:
        for index, micro in enumerate(micros):
            if index == len(micros) - 1 and distributed.get_rank() == 0:
                holder.note = NOTE
                if how == "layer":
                    layers[1] = copy.copy(layers[1])
            yield micro

    # A rank that replays finds another layer at its next call.
    with megagraph.disable_cuda_graphs_this_step() if how == "layer" else NOTHING:
        rig.schedule(trainer.model, changing(), len(micros), trainer.device)
    with pytest.raises(RuntimeError, match="inside a step the layers' state changed on some of the ranks"):
        rig.step(trainer, micros)


@on_ranks(2, tensor_parallel=2)
def test_a_skip_that_ends_inside_of_a_step_on_one_rank_alone_leaves_it_eager() -> None:
    """Bug: from then on that rank replayed, and the others ran the step eager."""
    trainer, _, micros = trained()
    before, is_first = rig.report_of(trainer), distributed.get_rank() == 0

    if is_first:
        megagraph.suspend()
    resuming = (micro for index, micro in enumerate(micros) if index == 0 or megagraph.resume() is None)
    rig.schedule(trainer.model, resuming, len(micros), trainer.device)
    eager = rig.eager_since(rig.report_of(trainer), before)
    assert eager == {"SUSPENDED" if is_first else "GROUP_DISAGREED": LAYERS * len(micros)}


@pytest.mark.parametrize(
    ("plugin", "config", "told"),
    [
        ({"verify": "off"}, {}, "verify: expected the same on all ranks that run the same packs, got 'off'"),
        ({"mode": "eager"}, {}, "mode: expected the same on all ranks"),
        ({"log_interval": 7, "poison": True}, {}, None),
        ({}, {"qk_clip": True}, "what keeps the model eager: expected the same on all ranks"),
    ],
)
@on_ranks(2, tensor_parallel=2)
def test_what_ranks_have_to_do_alike_is_compared_when_they_meet(plugin: Any, config: Any, told: Any) -> None:
    """Bug: one rank asked the others, who had another option or were refused, and waited for half an hour."""
    is_first = distributed.get_rank() == 0
    megagraph.install(rig.graph_config(**(plugin if is_first else {})))
    trainer = Trainer(parallel_jobs.OPTIONS, config=TENSOR_PARALLEL)
    for option, value in config.items() if is_first else ():
        setattr(trainer.chunk.config, option, value)
    (micros,) = parallel_jobs.small_steps(1)
    with contextlib.nullcontext() if told is None else pytest.raises(ValueError, match=told):
        rig.step(trainer, micros)


def _handing_on(model: Any, *args: Any, **kwargs: Any) -> Any:
    return GPTModel.forward(model, *args, **kwargs)


def _of_few_names(model, input_ids, position_ids, attention_mask, labels, packed_seq_params) -> Any:
    model.tables = types.MethodType(OwnModel.tables, model)
    return OwnModel.run(model, input_ids, position_ids, attention_mask, None, labels, packed_seq_params)


@pytest.mark.parametrize(("forward", "is_served"), [(_handing_on, True), (_of_few_names, False)])
@on_ranks(2, tensor_parallel=2)
def test_all_wait_for_a_forward_that_one_rank_alone_gets_between_steps(forward: Any, is_served: bool) -> None:
    """Bug: it ran its packs as given, beside collectives of a capacity's rows, and was refused alone."""
    trainer, _, micros = trained()
    chunk, is_here = trainer.chunk, distributed.get_rank() == 0
    expected, eager = rig.step(trainer, micros, update=False), []
    for index in range(3):
        before = rig.report_of(trainer)
        if is_here and index == 0:
            chunk.forward = types.MethodType(forward, chunk)
        elif is_here and index == 2:
            del chunk.forward
        assert_same_bits(rig.step(trainer, micros, update=False), expected)
        after = rig.report_of(trainer)
        eager.append(sum(rig.eager_since(after, before).values()))
        assert bool(after["failures"]) == (index == 1 and not is_served)
    assert eager == [len(micros) * LAYERS, 0 if is_served else len(micros) * LAYERS, 0]


@on_ranks(2, tensor_parallel=2)
def test_all_wait_for_a_forward_that_one_rank_has_when_they_first_meet() -> None:
    trainer, (micros,) = Trainer(parallel_jobs.OPTIONS, config=TENSOR_PARALLEL), parallel_jobs.small_steps(1)
    expected = rig.step(trainer, micros, update=False)
    megagraph.install(rig.graph_config())
    if distributed.get_rank() == 0:
        trainer.chunk.forward = types.MethodType(_handing_on, trainer.chunk)
    for _ in range(3):
        assert_same_bits(rig.step(trainer, micros, update=False), expected)
    calls = len(micros) * LAYERS
    rig.ran(rig.report_of(trainer), calls=3 * calls, WARMING_UP=2 * calls)


@on_ranks(2, tensor_parallel=2)
def test_what_ranks_find_alike_inside_of_a_step_keeps_it_eager() -> None:
    """A memory tool in the host's forward step."""
    trainer, _, micros = trained()
    before = rig.report_of(trainer)

    def forward_step(data: Iterator[rig.Micro], chunk: Any) -> Any:
        with parallel_jobs.SeesOps():
            return rig.forward(chunk, next(data), trainer.device)

    expected = rig.schedule(trainer.model, micros, len(micros), trainer.device)
    given = rig.run_schedule(trainer.model, forward_step, micros, len(micros))
    assert_same_bits([each["losses"] for each in given], expected)
    assert rig.eager_since(rig.report_of(trainer), before) == {"SIGNATURE_CHANGED": len(micros) * LAYERS}


@on_ranks(2)
def test_what_ranks_have_found_is_not_compared_with_one_that_gave_up() -> None:
    """Bug: its one number met one for each site."""
    group = HostGroup(frozenset({0, 1}), "capture")
    if distributed.get_rank() == 0:
        group.max_over_ranks([GAVE_UP])
        return
    with pytest.raises(GroupGaveUp):
        found_anywhere(group, {}, 3, "")


def test_a_verification_that_one_rank_cannot_finish_is_given_up_on_all(world2: World) -> None:
    """Bug: the others waited for it, in a module's collective or in an exchange."""
    for report in disagreeing(world2, {1: "verify"}):
        figures = rig.ran(report, verified=0, unverified=1, WARMING_UP=PER_STEP)["verification"]
        assert {it["why"] for it in figures["unverified_sites"]} == {"RuntimeError: this rank gives up"}


def test_a_capture_waits_on_every_rank_while_it_cannot_begin_on_one(world2: World) -> None:
    """Somebody holds a slot of rank 0 alone. A rank that captured by itself would wait in a collective."""
    for report in disagreeing(world2, {1: "hold"}, num_steps=3):
        rig.ran(report, WARMING_UP=2 * PER_STEP)


@on_ranks(2, tensor_parallel=2)
def test_tables_of_packs_that_run_as_given_go_under_sequence_parallelism() -> None:
    """Bug: a table of each longest document stayed for ever."""
    megagraph.install(rig.graph_config())
    trainer = parallel_jobs.model(config=SHARED_ROWS)
    seen: list[weakref.ref[Tensor]] = []
    rig.hands(trainer.chunk.decoder, lambda it: seen.append(weakref.ref(it["rotary_pos_emb"])) or it)
    for rows in range(2, 18, 2):
        rig.evaluate(trainer, [rope_rig.Declared(lengths=(2, rows), max_seqlen=2 + rows)])
    trainer.chunk.rotary_pos_emb.forward.cache_clear()  # Megatron's own
    assert len(seen) == 8 and len([it for it in seen if it() is not None]) == 1


@on_ranks(2, tensor_parallel=2)
def test_two_ranks_sum_the_gradients_of_norms_under_sequence_parallelism() -> None:
    """Each rank sees half of the rows, and has the gradient of all of them in the end."""

    def left_of_step(sequence_parallel: bool) -> rig.Step:
        sizes = {**TENSOR_PARALLEL, "sequence_parallel": sequence_parallel}
        micros = [rig.Micro(lengths=(9, 21)), rig.Micro(lengths=(3, 30, 7), seed=1)]
        return rig.step(rig.ModelTrainer(**sizes, qk_layernorm=True), micros, update=False)

    shared, whole = left_of_step(True), left_of_step(False)
    # On a GPU the model computes in bfloat16, and the two ways add up in another order.
    close: dict[str, float] = {"rtol": 5e-2, "atol": 2e-3} if torch.cuda.is_available() else {}
    torch.testing.assert_close(shared.losses, whole.losses, **close)
    torch.testing.assert_close(shared.grads, whole.grads, **close)
    ours = [grad for name, grad in shared.grads.items() if "norm" in name]
    assert len(ours) == 2 * (4 * LAYERS + 1)
    for grad in ours:
        both = [torch.empty_like(grad) for _ in range(2)]
        distributed.all_gather(both, grad)
        assert_same_bits(*both)


@on_ranks(2, tensor_parallel=2)
def test_ranks_that_share_rows_pad_packs_with_frequencies_of_each_token() -> None:
    """Where the model is entered, positions too, as soon as a pack has shown what its layers are handed."""
    packs = ((20, 8), 20), ((9, 40, 15), 40), ((20, 8), 28), ((9, 40, 15), 64)
    of_packs = [
        rope_rig.Declared(lengths=lengths, max_seqlen=longest, seed=seed)
        for seed, (lengths, longest) in enumerate((*packs, *packs[:2]))
    ]
    steps = [of_packs[:2], of_packs[2:4], of_packs[4:]]
    eager, graphed = rope_rig.padded_modes(steps, prepare=rope_rig.scatter_frequencies, **SHARED_ROWS)
    rig.ran(eager.report, WARMING_UP=rig.LAYERS, DISABLED=5 * rig.LAYERS)
    rig.ran(graphed.report, WARMING_UP=2 * rig.LAYERS)


@on_ranks(2, tensor_parallel=2)
def test_another_table_for_rows_that_were_added_is_an_error() -> None:
    """With sequence parallelism, of a host that hands the model's own tables on until its third step."""
    calls: list[Any] = []

    def change(given: dict[str, Any]) -> dict[str, Any]:
        calls.append(None)
        return {**given, "rotary_pos_emb": given["rotary_pos_emb"] * (1.0 if len(calls) < 3 else 0.5)}

    steps = [[rope_rig.Declared(lengths=(20, 8), max_seqlen=20)]] * 4
    given = {"prepare": lambda chunk: rig.hands(chunk.decoder, change), **SHARED_ROWS}
    with pytest.raises(RuntimeError, match="a rotary table that is not the model's own"):
        rig.train(rig.graph_config(), steps, **given)


@on_ranks(2, tensor_parallel=2)
def test_masks_on_two_tensor_parallel_ranks() -> None:
    """Each has that of its rows. Bug: where no layer had a graph, these were made as many as the pack's."""
    with mlps_that_read_masks() as seen:
        masked = partial(parallel_jobs.small_steps, masks=True)
        report = parallel_jobs.train_pair(steps_of=masked, config=SHARED_ROWS)
    assert len({mask.size(1) for mask in seen}) == 1  # rows of the capacity, or this rank's share of them
    assert report["eager"] == {"WARMING_UP": parallel_jobs.PACKS * rig.LAYERS} and report["failures"] == []
    assert report["verification"]["unverified"] == 0
    megagraph.uninstall()
    micros = rig.Micro(lengths=(40, 24), mask_seed=1), rig.Micro(lengths=(20, 10), mask_seed=2)
    with mlps_that_read_masks():
        parallel_jobs.cannot_capture(micros, SHARED_ROWS)
