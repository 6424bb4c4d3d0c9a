# SPDX-License-Identifier: Apache-2.0
"""The graphs of one GPTModel: decides on each micro-batch, captures at step boundaries.

Patches nothing; the seams call it.
"""

import contextlib
import inspect
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank import Bank, Chain, Progress
from megagraph.config import GraphConfig
from megagraph.dispatch import Capacity, EagerReason, PackShape, decide
from megagraph.eligibility import ineligible_sites
from megagraph.megatron import gradients
from megagraph.megatron.micro_batch import Kind, MicroBatch
from megagraph.megatron.refusals import check_graph_options, refusal_of
from megagraph.megatron.scopes.layer import LayerLoop, layer_sites
from megagraph.megatron.variants import learn_capacities, variant_spec
from megagraph.packing import PackForm, pack_shape
from megagraph.sites import VariantSpec

__all__ = ["ModelGraphs"]

_log = logging.getLogger("megagraph")


@contextlib.contextmanager
def capturing_flag() -> Iterator[None]:
    """Sets Megatron's own capturing flag, which silences the hooks of its DDP."""
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        yield
        return
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()


def _rng_trackers() -> list[Any]:
    from megatron.core import tensor_parallel

    return [tensor_parallel.get_cuda_rng_tracker()]


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; each submodule gets its own mode back."""
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


class ModelGraphs:
    """Everything the plugin knows of one GPTModel.

    Args:
        model: the GPTModel.
        ddp: Megatron's DDP around it, or None.
        config: the plugin's options.
        progress: shown while capturing.
    """

    def __init__(
        self, model: nn.Module, ddp: nn.Module | None, config: GraphConfig, progress: Progress | None
    ) -> None:
        check_graph_options(model.config)
        self.config = config
        self.capacities = config.all_capacities()
        self.refusal = refusal_of(model, ddp)
        self.name = type(model).__name__
        self._model = weakref.ref(model)
        self._ddp = ddp
        self._progress = progress
        self._layers: list[nn.Module] = list(model.decoder.layers)  # type: ignore[union-attr, arg-type]
        self._specs = layer_sites(self._layers)
        self._observed: set[PackShape] = set()
        self._kinds: dict[Kind, int] = {}  # to the steps in which it occurred
        self._kinds_of_step: set[Kind] = set()
        self._captured: set[Kind] = set()
        self._rotary: dict[Any, Mapping[str, Any]] = {}
        self._hidden: tuple[tuple[int, ...], torch.dtype] | None = None
        self._params_type: Any = None
        self._fingerprint: tuple[int, int] | None = None
        self._step_reason: EagerReason | None = None
        self.is_suspended = False
        self._past: dict[str, int] = {}
        self.failures: list[str] = []
        self.capture_seconds = 0.0
        device = next(model.parameters()).device
        self._valid_tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self._replayed_tokens = 0
        self._device = device
        self._bank, self._chain = self._new_bank()
        if self.refusal is not None:
            _log.warning(
                "%s stays eager (%s): %s", self.name, self.refusal.reason.name, self.refusal.sentence
            )

    def _new_bank(self) -> tuple[Bank, Chain]:
        bank = Bank(self._device, trackers=_rng_trackers(), poison=self.config.poison, guard=capturing_flag)
        return bank, bank.add_chain(self._specs)

    # -- micro-batches ---------------------------------------------------------------------------

    def decide(self, params: Any, tokens: int, *, training: bool, is_skipped: bool) -> MicroBatch:
        """Decides how a micro-batch runs, from its shapes and host integers alone.

        Args:
            params: its `PackedSeqParams`, or None.
            tokens: physical tokens of its input.
            training: whether the model is in training mode.
            is_skipped: graphs are switched off for this step.
        """
        capacity, kind, reason = self._decide(params, tokens, training)
        if reason is None:
            reason = self._why_not_now(is_skipped)
        return MicroBatch(
            params=params, tokens=tokens, capacity=capacity, kind=kind, reason=reason, tail=self.config.tail
        )

    def _decide(
        self, params: Any, tokens: int, training: bool
    ) -> tuple[Capacity | None, Kind | None, EagerReason | None]:
        if self.refusal is not None:
            return None, None, self.refusal.reason
        shape = None if params is None else pack_shape(params, tokens, self.config.tail)
        if shape is None:
            return None, None, EagerReason.NO_PACK_METADATA
        form = PackForm.of(params)
        if form is None:
            return None, None, EagerReason.SIGNATURE_CHANGED
        if not self.capacities:
            self._observed.add(shape)
            kind = Kind(form=form, grad=torch.is_grad_enabled(), training=training)
            self._kinds_of_step.add(kind)
            return None, None, EagerReason.WARMING_UP
        decision = decide(shape, {1: self.capacities})
        if decision.capacity is None:
            return None, None, decision.reason
        kind = Kind(form=form, grad=torch.is_grad_enabled(), training=training)
        self._kinds_of_step.add(kind)
        return decision.capacity, kind, None

    def _why_not_now(self, is_skipped: bool) -> EagerReason | None:
        if is_skipped or self.config.mode == "eager":
            return EagerReason.DISABLED
        if self.is_suspended:
            return EagerReason.SUSPENDED
        return self._step_reason

    def begin(self, batch: MicroBatch, hidden_states: Tensor) -> LayerLoop | None:
        """Leases a slot for a micro-batch and returns the loop that replays it; None runs it eager.

        Counts an eager micro-batch. `end()` ends one that replays.
        """
        self._hidden = tuple(hidden_states.shape[1:]), hidden_states.dtype
        self._params_type = type(batch.params)
        if batch.reason is None:
            batch.reason = self._chain.begin(batch.key, batch.sources)
        if batch.reason is not None:
            self._count(batch.reason)
            return None
        assert batch.capacity is not None

        def refuse() -> None:
            self._count(EagerReason.SIGNATURE_CHANGED)

        self._replayed_tokens += batch.capacity.tokens
        return LayerLoop(
            self._layers,
            self._chain.sites,
            self._rotary[batch.key],
            batch.pad,
            lambda: {"attention_mask": None, "packed_seq_params": batch.canonical_params()},
            refuse,
        )

    def end(self) -> None:
        """Ends the micro-batch that `begin()` leased a slot for."""
        self._chain.chunk.end()

    def _count(self, reason: EagerReason) -> None:
        self._bank.core.count_eager(int(reason), len(self._layers))

    # -- steps -----------------------------------------------------------------------------------

    def at_step_boundary(self, *, is_skipped: bool) -> None:
        """Before a step: learns capacities, looks for moved addresses, captures what is due."""
        self._step_reason = None
        if self.refusal is not None or self.is_suspended:
            return
        due = {kind for kind, steps in self._kinds.items() if steps >= self._warm_up_of(kind)}
        if due and not self.capacities:
            self._learn()
        if is_skipped or self.config.mode != "graph":
            return
        if self._fingerprint is not None:
            self._step_reason = self._what_moved()
            if self._step_reason is not None:
                self._drop_bank()
                return
        due -= self._captured
        if due:
            self._capture(due)

    def after_step(self) -> None:
        """After a step: remembers which kinds of micro-batches it held."""
        for kind in self._kinds_of_step:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        self._kinds_of_step.clear()

    def _warm_up_of(self, kind: Kind) -> int:
        return self.config.cuda_graph_warmup_steps if kind.grad else 1

    def _learn(self) -> None:
        self.capacities = learn_capacities(self._observed, self.config.tail)
        counts = ",".join(str(capacity.num_seqs) for capacity in self.capacities)
        _log.info(
            "learned from %d pack shapes; to fix them set cuda_graph_max_packed_seqs=%s and "
            "max_seqlen_per_dp_cp_rank=%d",
            len(self._observed),
            counts,
            self.capacities[0].tokens,
        )

    def _read_by_graphs(self) -> list[Tensor]:
        params = [param for layer in self._layers for param in layer.parameters()]
        grads = [grad for param in params if (grad := getattr(param, "main_grad", None)) is not None]
        return [*params, *grads]

    def _what_moved(self) -> EagerReason | None:
        addresses, flags = _C.fingerprint(self._read_by_graphs())
        assert self._fingerprint is not None
        if addresses != self._fingerprint[0]:
            return EagerReason.ADDRESS_MOVED
        if flags != self._fingerprint[1]:
            return EagerReason.PARAMETERS_CHANGED
        return None

    def _drop_bank(self) -> None:
        """Releases every graph; the next boundary captures again."""
        for name, count in self._bank.counters().items():
            self._past[name] = self._past.get(name, 0) + count
        self._bank.release()
        self.capture_seconds += self._bank.capture_seconds
        self._captured.clear()
        self._rotary.clear()
        self._fingerprint = None
        self._bank, self._chain = self._new_bank()

    # -- capture ---------------------------------------------------------------------------------

    def _capture(self, kinds: set[Kind]) -> None:
        if not self._chain.chunk.all_free():
            _log.warning("capture waits: %s", self._chain.chunk.describe_holders())
            return
        self._captured |= kinds
        if self._fingerprint is None:
            self._skip_ineligible()
            gradients.listen(self._chain.chunk, self._ddp, self._layers)
        try:
            for training in {kind.training for kind in kinds}:
                of_mode = [kind for kind in kinds if kind.training == training]
                variants = [self._variant(capacity, kind) for capacity in self.capacities for kind in of_mode]
                block: Any = self._model()
                with _mode(block.decoder, training):
                    self._bank.capture({self._chain: variants}, self._progress)
        except Exception as error:
            _log.exception("capture failed; training goes on eager")
            self.failures.append(str(error))
            self._drop_bank()
            self._captured |= kinds
            for rank in range(len(self._layers)):
                self._bank.skip(self._chain, rank, EagerReason.CAPTURE_FAILED)
            return
        self.failures += [str(failure) for failure in self._bank.failures[len(self.failures) :]]
        self._fingerprint = _C.fingerprint(self._read_by_graphs())
        _log.info(
            "captured %d graphs for %s in %.2f s",
            self._bank.num_graphs,
            "; ".join(str(capacity) for capacity in self.capacities),
            self._bank.capture_seconds,
        )

    def _skip_ineligible(self) -> None:
        model = self._model()
        assert model is not None
        own = {id(param) for layer in self._layers for param in layer.parameters()}
        outside = [
            param
            for name, module in model.named_children()
            if name != "decoder"
            for param in module.parameters()
            if id(param) in own
        ]
        found = ineligible_sites(
            self._specs,
            other_params=outside,
            is_expected_hook=gradients.is_ddp_hook,
            accumulator_hooks=gradients.hooks_per_parameter(self._ddp),
        )
        for rank, (reason, what) in found.items():
            _log.warning("%s stays eager (%s): %s", self._specs[rank].name, reason.name, what)
            self.failures.append(f"{self._specs[rank].name}: {reason.name}: {what}")
            self._bank.skip(self._chain, rank, reason)

    def _variant(self, capacity: Capacity, kind: Kind) -> VariantSpec:
        assert self._hidden is not None
        return variant_spec(
            capacity,
            kind,
            tail=self.config.tail,
            row_shape=self._hidden[0],
            dtype=self._hidden[1],
            valid_tokens=self._valid_tokens,
            params_type=self._params_type,
            block_arguments=lambda params, hidden: self._block_arguments((capacity, kind), params, hidden),
        )

    def _block_arguments(self, key: Any, params: Any, hidden: Tensor) -> Mapping[str, Any]:
        """What Megatron's own preprocessing hands to the layers for a canonical pack."""
        model: Any = self._model()
        accepted = inspect.signature(model._preprocess).parameters
        given = {
            "input_ids": None,
            "position_ids": None,
            "decoder_input": hidden,
            "packed_seq_params": params,
        }
        _hidden, *tables = model._preprocess(**{k: v for k, v in given.items() if k in accepted})
        names = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "padding_mask")
        self._rotary[key] = {
            name: value for name, value in zip(names, tables, strict=False) if value is not None
        }
        return {"attention_mask": None, "packed_seq_params": params, **self._rotary[key]}

    # -- life ------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """No replays until `resume()`."""
        self.is_suspended = True

    def resume(self) -> None:
        """Replays again, after the addresses have been looked at."""
        self.is_suspended = False

    def release(self) -> None:
        """Drops every graph for good."""
        self._bank.release()

    def report(self) -> dict[str, Any]:
        """Counters, padding and captures as plain values. Waits for the device."""
        counters = {name: count + self._past.get(name, 0) for name, count in self._bank.counters().items()}
        eager = {reason.name: counters[reason.name] for reason in EagerReason if counters[reason.name]}
        valid = int(self._valid_tokens.item())
        return {
            "model": self.name,
            "layers": len(self._layers),
            "calls": counters["calls"],
            "replays": counters["replays"],
            "eager": eager,
            "capacities": [str(capacity) for capacity in self.capacities],
            "graphs": self._bank.num_graphs,
            "capture_seconds": self.capture_seconds + self._bank.capture_seconds,
            "padding_share": 1 - valid / self._replayed_tokens if self._replayed_tokens else None,
            "failures": list(self.failures),
        }
