# SPDX-License-Identifier: Apache-2.0
"""The bank of one block of layers: captures its variants, begins anew, counts.

Does not decide which micro-batch replays, nor when to capture.
"""

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.agreement import GroupGaveUp, Verdict
from megagraph.bank.bank import Bank, Progress
from megagraph.bank.chain import Chain
from megagraph.bank.eligibility import ineligible_sites
from megagraph.bank.sites import VariantSpec
from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.log import log
from megagraph.megatron import seams
from megagraph.megatron.graphs import while_capturing
from megagraph.megatron.graphs.micro_batch import Kind
from megagraph.megatron.graphs.refusals import Refusal, refusal_of
from megagraph.megatron.graphs.variants import variant_spec
from megagraph.megatron.parallel.ddp import ParamSyncs, accumulator_hooks, find_ddp, is_ddp_hook, listen
from megagraph.megatron.parallel.tensor import Peers
from megagraph.megatron.scopes.layer import layer_sites
from megagraph.megatron.watch.layers import LayerWatch
from megagraph.packs.packing import TailConvention

__all__ = ["BlockBank"]


class BlockBank:
    """Graphs of the layers of one GPTModel's block.

    Args:
        model: the GPTModel.
        ddp: Megatron's DDP around it, or None.
        tail: convention of the canonical offsets.
        poison: fill freed slots with NaN.
        annotate: name replays for profilers.
        progress: shown while capturing.
    """

    def __init__(
        self,
        model: nn.Module,
        ddp: nn.Module | None,
        *,
        tail: TailConvention,
        poison: bool,
        annotate: bool,
        progress: Progress | None,
    ) -> None:
        # Both weakly: this lives as long as the model does, and must not keep it alive.
        self._model = weakref.ref(model)
        self._ddp_ref = None if ddp is None else weakref.ref(ddp)
        self._tail = tail
        self._poison = poison
        self._annotate = annotate
        self._progress = progress
        block: Any = model.decoder
        self._specs = layer_sites(list(block.layers), while_capturing.block_context(block))
        self.num_layers = len(self._specs)
        self._device = next(model.parameters()).device
        self.peers = Peers(model)
        self._workspaces: list[Tensor] = []
        self.param_syncs = ParamSyncs(ddp, self.layers)
        self._valid_tokens = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.watch = LayerWatch(self._specs)
        # Of each variant's name: what was captured under one numeric setting after another.
        self._by_settings: dict[Any, list[int]] = {}
        self._past: dict[str, int] = {}
        self._past_seconds = 0.0
        # Rotary tables and the like that each variant was captured with.
        self.constants: dict[Any, Mapping[str, Any]] = {}
        # Equal tensors that Megatron made later.
        self.equal_constants: dict[Any, dict[str, Tensor]] = {}
        self.failures: list[str] = []
        self._last_holders = ""
        self.bank, self.chain = self._new_bank()

    @property
    def layers(self) -> list[nn.Module]:
        """The block's layers."""
        return [spec.module for spec in self._specs]

    def _ddp(self) -> nn.Module | None:
        return None if self._ddp_ref is None else self._ddp_ref()

    def find_ddp(self, models: Sequence[nn.Module]) -> bool:
        """Looks for the DDP around the model where none is known; whether it was found now."""
        model = self._model()
        if self._ddp() is not None or model is None:
            return False
        ddp = find_ddp(models, model)
        if ddp is None:
            return False
        self._ddp_ref = weakref.ref(ddp)
        self.param_syncs = ParamSyncs(ddp, self.layers)
        self.reset()
        return True

    def refusal(self) -> Refusal | None:
        """Why no layer can be graphed, from the model and its DDP."""
        model = self._model()
        assert model is not None
        return refusal_of(model, self._ddp())

    def _new_bank(self) -> tuple[Bank, Chain]:
        bank = Bank(
            self._device,
            trackers=while_capturing.rng_trackers(),
            poison=self._poison,
            guard=while_capturing.capturing,
            exchange=self.peers.exchange,
            annotate=self._annotate,
        )
        return bank, bank.add_chain(self._specs, holds_collectives=self.peers.size > 1)

    # -- capture ---------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nobody holds a slot, so that a capture may begin; says who does otherwise."""
        holders = self.chain.holders()
        if holders and holders != self._last_holders:  # once, and not in each step
            log.warning("capture waits: %s", holders)
        self._last_holders = holders
        return not holders

    def capture(
        self,
        capacities: Sequence[Capacity],
        kinds: Iterable[Kind],
        *,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        params_type: type[Any],
    ) -> bool:
        """Captures each capacity for each kind. A failure of a layer is logged and leaves it eager.

        Returns:
            False where everything had to be dropped, also what was captured before.

        Args:
            capacities: shapes.
            kinds: packs and modes.
            row_shape: of the hidden states, without their first dimension.
            dtype: of the hidden states.
            params_type: `PackedSeqParams`.
        """
        if not self.watch.is_watching:
            self.watch.expect_modules(self._find_ineligible())
            self._skip(self._ineligible_in_group())
            listen(self.chain, self._ddp(), self.layers)
        variants = [
            self._variant(capacity, kind, row_shape, dtype, params_type)
            for kind in kinds
            for capacity in capacities
        ]
        try:
            self.bank.capture({self.chain: variants}, self._progress)
            self._agree_on_variants()
        except GroupGaveUp as error:
            log.warning("%s; training goes on eager", error)
            self._abandon(str(error), variants, EagerReason.GROUP_DISAGREED)
            return False
        except Exception as error:
            log.exception("capture failed; training goes on eager")
            self.peers.exchange([Verdict.GAVE_UP])
            self._abandon(f"{type(error).__name__}: {error}", variants, EagerReason.CAPTURE_FAILED)
            return False
        self._workspaces = while_capturing.held_workspaces()
        self.failures += [str(failure) for failure in self.bank.failures]
        self.bank.failures.clear()
        self.watch.expect_memory(grad=any(variant.training for variant in variants))
        for name, index in self.chain.variants.items():
            indices = self._by_settings.setdefault(name, [])
            indices += [] if index in indices else [index]
        log.info(
            "captured %d graphs in %.2f s for %s",
            self.bank.num_graphs,
            self.bank.capture_seconds,
            "; ".join(str(capacity) for capacity in capacities),
        )
        return True

    def _agree_on_variants(self) -> None:
        """Makes sure that every rank of the group sealed the same graphs."""
        sealed = sorted(map(repr, self.chain.variants)), sorted(self.chain.eager_sites)
        if self.peers.exchange([Verdict.FINE]) != [Verdict.FINE] or not self.peers.agree_on(repr(sealed)):
            raise GroupGaveUp

    def _abandon(self, why: str, variants: Iterable[VariantSpec], reason: EagerReason) -> None:
        """Drops everything; these variants stay eager."""
        self.failures.append(why)
        self.reset()
        for variant in variants:
            self.chain.eager_variants[variant.key] = reason

    def _find_ineligible(self) -> Mapping[int, tuple[EagerReason, str]]:
        model = self._model()
        assert model is not None
        outside = [
            param
            for name, module in model.named_children()
            if name != "decoder"
            for param in module.parameters()
        ]
        return ineligible_sites(
            self._specs,
            other_params=outside,
            is_expected_hook=is_ddp_hook,
            accumulator_hooks=accumulator_hooks(self._ddp()),
        )

    def _ineligible_in_group(self) -> Mapping[int, tuple[EagerReason, str]]:
        """Sites that some rank of the group cannot graph."""
        here = self._find_ineligible()
        anywhere = self.peers.exchange([int(index in here) for index in range(self.num_layers)])
        disagreed = EagerReason.GROUP_DISAGREED, "another rank of the group cannot graph it"
        return {index: here.get(index, disagreed) for index, found in enumerate(anywhere) if found}

    def _skip(self, found: Mapping[int, tuple[EagerReason, str]]) -> None:
        for index, (reason, what) in found.items():
            sentence = f"{self._specs[index].name} stays eager ({reason.name}): {what}"
            log.warning(sentence)
            self.failures.append(sentence)
            self.chain.keep_eager(index, reason)

    def _variant(
        self,
        capacity: Capacity,
        kind: Kind,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        params_type: type[Any],
    ) -> VariantSpec:
        def context() -> contextlib.AbstractContextManager[None]:
            model: Any = self._model()  # looked up each time: variants must not keep it alive
            return while_capturing.in_mode(model.decoder, kind.training)

        def block_arguments(params: Any, hidden: Tensor) -> Mapping[str, Any]:
            # The first ones stay: graphs of former numeric settings read them.
            if (capacity, kind) not in self.constants:
                self.constants[capacity, kind] = self._tables(params, hidden)
            return {"attention_mask": None, "packed_seq_params": params, **self.constants[capacity, kind]}

        return variant_spec(
            capacity,
            kind,
            rows=self.peers.rows(capacity.tokens),
            tail=self._tail,
            row_shape=row_shape,
            dtype=dtype,
            valid_tokens=self._valid_tokens,
            params_type=params_type,
            block_arguments=block_arguments,
            context=context,
        )

    def _tables(self, params: Any, hidden: Tensor) -> Mapping[str, Any]:
        """What Megatron's own preprocessing hands to the layers beside a canonical pack."""
        model: Any = self._model()
        if not hasattr(model, "_preprocess"):
            return seams.handed_to_hybrid_stack(model, params, hidden)
        accepted = inspect.signature(model._preprocess).parameters
        given = {
            "input_ids": None,
            "position_ids": None,
            "decoder_input": hidden,
            "packed_seq_params": params,
        }
        _hidden, *tables = model._preprocess(**{k: v for k, v in given.items() if k in accepted})
        names = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "padding_mask")
        named = zip(names, tables, strict=False)
        return {name: value for name, value in named if value is not None}

    # -- what graphs rely on ----------------------------------------------------------------------

    def kinds_of_other_settings(self) -> set[Kind]:
        """Lets each name mean the graphs of the numeric settings in force; the kinds that have none yet.

        What could not be captured under some settings is not tried again under any others.
        """
        without = set()
        for name, indices in self._by_settings.items():
            fitting = [index for index in indices if not self.chain.core.changed_setting(index)]
            if fitting:
                self.chain.variants[name] = fitting[0]
            elif name not in self.chain.eager_variants:
                without.add(name[1])
        return without

    def what_changed(self) -> EagerReason | None:
        """Why the graphs must not be replayed any more, or None."""
        return self.watch.what_changed(self._find_ineligible)

    def reset(self) -> None:
        """Releases every graph and begins another bank; the counters go on."""
        for name, count in self.bank.counters().items():
            self._past[name] = self._past.get(name, 0) + count
        self._past_seconds += self.bank.capture_seconds
        self.bank.release()
        self.constants.clear()
        self.equal_constants.clear()
        self._by_settings.clear()
        self.watch = LayerWatch(self._specs)
        self.bank, self.chain = self._new_bank()

    # -- figures ---------------------------------------------------------------------------------

    def count_eager(self, reason: EagerReason) -> None:
        """Counts one micro-batch that runs eager: a call of every layer."""
        self.bank.core.count_eager(reason, self.num_layers)

    def counters(self) -> dict[str, int]:
        """Calls, replays and eager calls by reason, over all banks so far."""
        now = self.bank.counters()
        return {name: count + self._past.get(name, 0) for name, count in now.items()}

    def valid_tokens(self) -> int:
        """Valid tokens of all replayed packs. Waits for the device."""
        return int(self._valid_tokens.item())

    @property
    def capture_seconds(self) -> float:
        """Time spent capturing, over all banks so far."""
        return self._past_seconds + self.bank.capture_seconds
