# SPDX-License-Identifier: Apache-2.0
"""What runs in place of the plans by which Megatron trains a GPTModel under expert-parallel overlap.

Note [Plans]
The combined 1F1B schedule calls no forward: it asks for a plan of each micro-batch, whose nodes, parts of
layers, run beside those of another one's backward. Steps that only go forward call the model.

Nodes belong to one plan, and so to one micro-batch, whose passage binds them. The first node of a layer
replays its site; what is left up to the dispatch is eager there. Dispatch, experts and combine are
Megatron's. A slot is leased in the first node of the first layer, which is where rows are staged, and the
lease ends behind the last node, which cuts them; or where the schedule raises. The pack, the mask and the
rotary table of the layers are in the plan's state while a first node runs: what lies before and behind the
layers sees the pack as it was given.

Order. Both passes of each node wait for their plan's one event, and record it: first nodes and experts wait
for the communication stream, dispatch and combine for the compute stream; late gradients follow on that. Two
micro-batches share parameters, gradients and metrics, on the compute stream alone. So they do the memory of
their slots (csrc/bank/replay/slot_ring.h, Note [Facing slots]): the last node that reads what a layer keeps
is its first one, in its backward or in what finishes that, on the compute stream, which uses the memory next.
What is dispatched lies in memory of both: behind each dispatch comes, on the compute stream, the forward of
its experts before the other one's backward of attention; with `ep_overlap_early_attn_memory_release` a
dispatch's backward, which layers of experts alone have: in a block with others slots don't share it.

With `delay_wgrad_compute` a node's `backward_dw()` makes what its backward has left, before that of the layer
before runs; the first layer's waits for what a pipeline sends. Nodes are told what to call by their forward.

Nodes keep what they were given and have handed out until their backward. What is dispatched is transient all
the same: by `resize_(0)` of its input a dispatch drops a holder of the slot, and later passes use the memory.
Likewise what a layer has handed out, and eager keeps for a norm, goes once the next one's site has staged it,
in the node of its MLP: fewer frames have it by then, and who saves or keeps it shows beside these.
Megatron's nodes route without the padding mask, which changes losses: the first one of each layer gets it.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megagraph._C import Finish, by_name, free_if_unread, has_layers
from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.graphs.entry import names_of
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.plugin import Plugin
from megagraph.megatron.scopes.moe import let_go_of
from megagraph.megatron.scopes.parts import experts_of
from megagraph.megatron.scopes.plan import LayerStep
from megagraph.megatron.seams import PACKED_SEQ_PARAMS, nodes_of, stand_in
from megagraph.reasons import EagerReason

__all__ = ["wrap_plan", "wrap_step"]

_Function = Callable[..., Any]

# What a plan's state holds for its layers, beside the pack and the mask.
_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")


def wrap_step(plugin: Plugin, original: _Function) -> _Function:
    """Wraps the combined forward and backward of two micro-batches: notes which pack is made inside."""

    def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        packs: Any = PACKED_SEQ_PARAMS.function()
        make = packs.__init__

        @functools.wraps(make)  # its signature is asked for
        def init(pack: Any, *given: Any, **fields: Any) -> None:
            make(pack, *given, **fields)
            plugin.last_pack = weakref.ref(pack)

        with stand_in(plugin, last_pack=None), stand_in(packs, __init__=init):
            return original(*args, **kwargs)

    return combined_forward_backward_step


def wrap_plan(plugin: Plugin, original: _Function) -> _Function:
    """Wraps `GPTModel.build_schedule_plan`: decides on the micro-batch, and binds the nodes to it."""
    names = names_of(original)[1:]

    def build_schedule_plan(model: Any, *args: Any, **kwargs: Any) -> Any:
        if plugin.is_over or not has_layers(model):  # a stage of a pipeline
            return original(model, *args, **kwargs)
        graphs = plugin.graphs_of_model(model)
        args, kwargs = by_name(names, args, kwargs)
        is_first_stage, ids = getattr(model, "pre_process", True), kwargs["input_ids"]
        hidden_states = kwargs.get("decoder_input") if is_first_stage else model.decoder.input_tensor
        tokens = ids.numel() if hidden_states is None else graphs.tensor.num_tokens(hidden_states)
        params = kwargs.get("packed_seq_params")
        if params is None and plugin.last_pack is not None and kwargs.get("attention_mask") is None:
            _check_left_out(plugin.last_pack(), tokens * graphs.context.size)
        dispatcher, why = graphs.dispatcher, None
        if graphs not in plugin.step_graphs or not graphs.entries.are_megatrons:
            why = dispatcher.eager_reason(params, tokens, True) or EagerReason.EXPERT_OVERLAP
        batch: MicroBatch | EagerReason | None
        batch = graphs.decide(model, kwargs, params, tokens, why, may_capture=not plugin.has_pipeline)
        plan = original(model, *args, **kwargs)
        if isinstance(batch, EagerReason) and (graphs.refusal or batch not in graphs.learns_from):
            dispatcher.count_eager(batch)
            batch = None
        if graphs.refusal is None:
            _Passage(graphs, batch, plan)  # which its nodes keep
        if isinstance(batch, MicroBatch) and batch.entry_padding and kwargs.get("output_processor") is None:
            run = plan.post_process.forward_func
            plan.post_process.forward_func = lambda hidden: run(hidden)[:, :tokens]
        return plan

    return build_schedule_plan


def _check_left_out(pack: Any, rows: int) -> None:
    """Raises `ValueError` if the pack made last must be that of a plan which its script has given none."""
    padded = getattr(pack, "cu_seqlens_q_padded", None)
    offsets = getattr(pack, "cu_seqlens_q", None) if padded is None else padded
    if offsets is not None and int(offsets[-1]) == rows:  # here alone the host waits for the device
        raise ValueError(
            "expected packed_seq_params in build_schedule_plan(), got none beside a PackedSeqParams of just "
            f"its {rows} rows: hand it on where forward_step makes a plan, or documents attend to each other"
        )


class _Passage:
    """The way of a micro-batch through the forward nodes of its plan; None is but routed with the mask."""

    def __init__(self, graphs: GraphedModel, batch: MicroBatch | EagerReason | None, plan: Any) -> None:
        self._graphs, self._batch = graphs, batch
        self._steps: Mapping[int, Sequence[LayerStep]] = {}  # of layers, if they replay
        self._before_site: Callable[[int], None] | None = None
        self._has_replayed = False
        self._let_go: dict[int, Callable[[], None]] = {}  # by layer: of what was routed in a graph
        self._handed_on: Tensor | None = None  # by a layer to the next one
        self._staged: tuple[Tensor, Tensor] | None = None  # the same, with what a graph has staged of it
        nodes = [*nodes_of(plan)]
        for index, (layer, first, mlp, last) in enumerate(nodes):
            first.submodule = functools.partial(self._first, index, layer, experts_of(layer), first.submodule)
            if self._batch is not None:
                mlp.submodule = functools.partial(self._mlp, mlp.submodule)
                is_end = index == len(nodes) - 1
                last.submodule = functools.partial(self._last, index, is_end, last.submodule)

    def end(self) -> None:
        """Ends the lease, behind the last node or where the schedule raises."""
        graphs, batch = self._graphs, self._batch
        assert isinstance(batch, MicroBatch)
        graphs.end_plan, self._handed_on, self._staged, self._steps = None, None, None, {}
        while self._let_go:
            self._let_go.popitem()[1]()
        graphs.dispatcher.end(batch)

    def _begin(self, state: Any, entered: Tensor) -> None:
        """Where a call enters the block."""
        graphs, batch, captures = self._graphs, self._batch, self._graphs.captures
        table, mask = state.rotary_pos_emb, state.padding_mask
        if isinstance(batch, EagerReason):
            graphs.look_at_table(table, state.packed_seq_params, entered)
            graphs.count_as_given(batch, entered)
        elif batch is not None and (variant := graphs.begin(batch, entered, table, mask)) is not None:
            graphs.end_plan = self.end
            constants = captures.constants[variant]
            if mask is batch.mask and constants.hold({name: getattr(state, name) for name in _TABLES}):
                self._steps = captures.steps[variant]
                self._before_site = captures.before_sites and captures.before_sites()
            else:
                graphs.dispatcher.turn_eager(constants, batch, entered, table, mask)

    def _first(
        self, index: int, layer: Any, mixture: Any, submodule: _Function, node: Any, hidden_states: Tensor
    ) -> Any:
        """Runs all of a layer up to the dispatch."""
        if index == 0:
            self._begin(node.chunk_state, hidden_states)
        batch = self._batch
        if not isinstance(batch, MicroBatch):
            return _run(submodule, mixture, node, hidden_states)
        with stand_in(self._graphs, running=batch):
            attended, front = self._replay(index, node, hidden_states)
            if front is not None:
                self._let_go[index] = let_go_of(mixture)
                # For the other nodes what Megatron's own first one would leave.
                rows, probs, shared, residual = front(layer, attended)
                node.layer_state.residual = node.detach(residual)
                if shared is not None:
                    node.layer_state.shared_expert_output = node.detach(shared)
                return rows, probs
            if attended is None and index == 0:
                hidden_states = batch.pad(hidden_states)
            attention = {} if attended is None else {"_forward_attention": lambda **_: (attended, None)}
            with stand_in(node.chunk_state, **batch.layer_arguments()), stand_in(layer, **attention):
                return _run(submodule, mixture, node, hidden_states)

    def _replay(self, index: int, node: Any, before: Tensor) -> tuple[Any, _Function | None]:
        """Replays the site of a layer, if its micro-batch replays.

        Returns hidden states behind attention, if any; or what a router left, and what goes on from there.
        """
        batch, captures = self._batch, self._graphs.captures
        assert isinstance(batch, MicroBatch)
        bank, steps = captures.bank, self._steps.get(index, ())
        attended, self._handed_on, handed_on = None, None, self._handed_on
        for step in steps:
            if step.site is None and not step.parts:
                break
            if step.site is None:  # attention before a router in a graph
                rows = batch.pad(before) if step.layer == 0 else before
                tables = {name: getattr(node.chunk_state, name) for name in _TABLES}
                before = attended = step.run_eager(rows, {**tables, **batch.layer_arguments()})
                continue
            if self._before_site is not None:
                self._before_site(step.site)
            out = bank.sites[step.site](before)
            if out is NotImplemented:
                break
            self._has_replayed = True
            if handed_on is not None:
                self._staged = handed_on, before
            if node.delay_wgrad_compute:
                late = functools.partial(_make_late, steps, step, bank.take_finish())
                # Of parameters Megatron asks for hooks that its FSDP alone has.
                node.bwd_dw_callables = [types.SimpleNamespace(backward_dw=late, parameters=tuple)]
            return out, steps[-1].parts[-1].front if steps[-1].parts else None
        return attended, None

    def _mlp(self, submodule: _Function, node: Any, *given: Any) -> Any:
        """Frees what the layer before has handed on and a graph has staged, unless it can be read."""
        staged, self._staged = self._staged, None
        # That node's, one of the schedule, the pair's and one here.
        if staged is not None and sys.getrefcount(staged[0]) == 4:
            free_if_unread(*staged)
        return submodule(node, *given)

    def _last(self, index: int, is_end: bool, submodule: _Function, node: Any, *given: Any) -> Any:
        """Runs the last node of a layer; behind that of the last one as many rows are left as were given."""
        out = submodule(node, *given)
        self._let_go.pop(index, lambda: None)()
        graphs, batch = self._graphs, self._batch
        self._handed_on = None if is_end else out
        if not is_end or not isinstance(batch, MicroBatch):
            return out
        cut = batch.cut(out)
        if graphs.end_plan is None:
            graphs.verifier.keep_gradient(batch, out)
        else:
            if not self._has_replayed and batch.reason is None:
                graphs.captures.note("a plan's micro-batch has graphs, and replayed none")
            self.end()
        return cut


def _make_late(steps: Sequence[LayerStep], replayed: LayerStep, finish: Finish | None) -> None:
    """In place of what makes the late gradients of a layer: the same for one that has replayed."""
    for step in reversed(steps):
        if step is not replayed:
            step.run_late(step.step.module)
        elif finish is not None:
            finish()


def _run(submodule: _Function, mixture: Any, node: Any, hidden_states: Tensor) -> Any:
    """Runs Megatron's own first node of a layer, whose router gets the micro-batch's mask."""
    mask = node.chunk_state.padding_mask
    if mixture is None or mask is None:
        return submodule(node, hidden_states)
    mask = mask.transpose(0, 1).bool()  # as `MoELayer.forward` has it
    with stand_in(mixture, route=functools.partial(mixture.route, padding_mask=mask)):
        return submodule(node, hidden_states)
