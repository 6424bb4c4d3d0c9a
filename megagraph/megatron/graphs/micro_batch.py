# SPDX-License-Identifier: Apache-2.0
"""One micro-batch on its way through a model chunk: what was given, what was decided.

An eager micro-batch that a capacity holds runs on the canonical pack as well: it is the reference whose bits
graphs have. If no layer could be captured that would gain nothing, and its pack runs as it was given.

Under sequence parallelism ranks share the rows between the layers, so that no rank's rows end where the pack
does. Such a pack is padded where the model is entered, token ids, positions and labels, and the losses of the
rows that were added are cut off.

A padding mask is staged like the offsets, and layers that run eager get the same one. A mask that is none of
the variant's has its micro-batch run as it was given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megagraph.bank.sites import mask_content
from megagraph.decide.dispatch import VariantKey
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.layer_arguments import LayerArguments, mark_canonical, with_canonical_mark
from megagraph.megatron.graphs.pack_fields import copy_foreign_attributes, fields_of, put_seq_idx
from megagraph.megatron.parallel.model_parallel import require_rows
from megagraph.packs import ops
from megagraph.packs.packing import TailConvention, added_offsets, canonical_constants, canonical_offsets

__all__ = ["BatchRules", "MicroBatch", "Variant", "is_mask"]


@dataclass(frozen=True, kw_only=True)
class BatchRules:
    """What all micro-batches of a model have in common.

    Args:
        tail: the convention of canonical offsets.
        masks_tail: layers are given a padding mask in any case, of the rows past the pack's end.
        pads_at_entry: ranks share the rows of hidden states, so that packs are padded before the embedding
            and cut after the output layer, and nothing is done in between.
        needs_every_row: ranks of other packs run the capacity's rows, and so must this one.
        arguments: of the layers, which tell the model's own rotary tables.
    """

    tail: TailConvention
    masks_tail: bool
    pads_at_entry: bool
    needs_every_row: bool
    arguments: LayerArguments


class Variant:
    """What all micro-batches of a variant have in common, in plain attributes: these are read in each.

    Args:
        rules: what those of its model have in common.
        key: its name.
    """

    __slots__ = (
        "_constants",
        "capacity",
        "cp_size",
        "form",
        "has_mask",
        "has_seq_idx",
        "key",
        "physical",
        "rules",
    )

    def __init__(self, rules: BatchRules, key: VariantKey) -> None:
        self.rules, self.key = rules, key
        self.capacity, self.form = key.capacity, key.form
        self.has_mask, self.cp_size, self.has_seq_idx = key.has_mask, key.cp_size, self.form.has_seq_idx
        self.physical = int(self.form.has_padded)  # which source ends where the pack does
        self._constants: dict[type[Any], Mapping[str, Any]] = {}

    def constants(self, params_type: type[Any]) -> Mapping[str, Any]:
        """What its canonical packs say beside their offsets, less what the release does not have."""
        found = self._constants.get(params_type)
        if found is None:
            assert self.capacity is not None
            fields = canonical_constants(self.form, self.rules.tail, self.capacity)
            known = fields_of(params_type)  # type: ignore[arg-type]  # a class is hashable
            found = {name: value for name, value in fields.items() if name in known}
            self._constants[params_type] = found
        return found


def is_mask(mask: Any, rows: int, device: torch.device) -> bool:
    """Whether it is a padding mask that graphs take: bool [1, rows], True in rows of padding."""
    is_plain = type(mask) is Tensor and mask.dtype is torch.bool
    return is_plain and mask.shape == (1, rows) and mask.device == device


class MicroBatch:
    """A pack that a capacity holds, and the decision on it.

    Args:
        params: the `PackedSeqParams` as given.
        tokens: physical tokens of the input.
        variant: that takes it, with the capacity that it is padded to.
        reason: why it runs eager; None replays.
        sources: what staging reads: offsets, `seq_idx`, offsets of this rank's rows, as far as there are any.

    Attributes:
        key, capacity: of its variant.
        is_as_given: layers run on the pack as it was given.
        sources: with the mask, if it has one.
        mask: the padding mask that the block was given, of this rank's rows; None for none.
    """

    __slots__ = (
        "_canonical",
        "_canonical_mask",
        "_entered",
        "_given",
        "_rules",
        "capacity",
        "entry_padding",
        "is_as_given",
        "key",
        "mask",
        "params",
        "physical_offsets",
        "reason",
        "row_offsets",
        "sources",
        "tokens",
        "variant",
    )

    def __init__(
        self,
        params: Any,
        tokens: int,
        variant: Variant,
        reason: EagerReason | None,
        sources: list[Tensor],
    ) -> None:
        assert variant.capacity is not None
        self.params = self._given = params
        self.tokens = tokens
        self.variant, self._rules, self.key, self.capacity = (
            variant,
            variant.rules,
            variant.key,
            variant.capacity,
        )
        self.reason = reason
        self.sources: Sequence[Tensor] = sources
        self.mask: Tensor | None = None
        # Whose last entry is the pack's physical end.
        self.physical_offsets = sources[variant.physical]
        self.row_offsets = sources[-1] if variant.cp_size > 1 else self.physical_offsets
        # Rows to add to each row list of the model's input.
        self.entry_padding = self.capacity.tokens - tokens if variant.rules.pads_at_entry else 0
        self.is_as_given = False
        self._canonical: Any = None
        self._entered: Any = None
        self._canonical_mask: Tensor | None = None

    def as_given(self, reason: EagerReason) -> "MicroBatch | EagerReason":
        """Before a model of Megatron's is entered: runs eager on its own pack, with our RoPE if unfused."""
        tables = self._rules.arguments
        if not tables.depend_on_max_seqlen:  # Megatron's takes a tail
            return reason
        self.reason = reason
        self.params = with_canonical_mark(self._given)
        self.entry_padding = 0
        self.is_as_given = True
        return self

    def is_own(self, table: Any, hidden_states: Tensor) -> bool:
        """Whether the model has made a rotary table that its layers are handed.

        Args:
            table: what they are handed.
            hidden_states: what the block was given.
        """
        tables = self._rules.arguments
        return tables.include(table, self.constant_params(), hidden_states)

    def given_params(self, *, is_own_table: bool) -> Any:
        """The pack as it was given, for layers that run on it.

        The model's own table has the rows of the capacity's longest document, so that RoPE is ours. What a
        table of the host's means Megatron knows alone.

        Args:
            is_own_table: what `is_own()` says of the rotary table that they are handed.

        Raises:
            RuntimeError: where a host has made the table of rows that were added where the model was entered.
        """
        if is_own_table:
            return with_canonical_mark(self._given)
        if self.entry_padding:
            raise RuntimeError(
                "with sequence parallelism the layers of a padded pack are handed a rotary table that is not "
                "the model's own; expected such tables from the first micro-batch on, or never (with experts "
                "never)"
            )
        return self._given

    def run_as_given(self, *, is_own_table: bool) -> None:
        """Inside of the model: lets the layers run on `given_params()`.

        Rows that were added where the model was entered stay.
        """
        self.params, self.is_as_given = self.given_params(is_own_table=is_own_table), True

    def canonical_params(self) -> Any:
        """The canonical pack, for layers that run eager; made at the first request.

        The pack as it was given where that is what runs.
        """
        if self.is_as_given:
            return self.params
        if self._canonical is None:
            form = self.variant.form
            tokens, slots = self.capacity.tokens * self.variant.cp_size, self.capacity.num_seqs
            given = {"actual": self.sources[0], "padded": self.physical_offsets}
            added = added_offsets(self._rules.tail, tokens, has_padded=form.has_padded)
            offsets = {name: ops.pad_cu_seqlens(given[name], slots, end) for name, end in added.items()}
            self._canonical = self._with_offsets(offsets["actual"], offsets.get("padded"))
            if form.has_seq_idx:
                rows = self.capacity.tokens
                index = functional.pad(self.params.seq_idx, (0, rows - self.tokens), value=slots)
                put_seq_idx(self._canonical, index, rows)
            mark_canonical(self._canonical)
        return self._canonical

    def mask_at_entry(self, mask: Tensor | None) -> Tensor | None:
        """The padding mask that the model is given: the canonical pack's where that is padded at entry.

        Args:
            mask: the user's, or None.
        """
        return self._padded_mask(mask) if self._rules.pads_at_entry and not self.is_as_given else mask

    def take_mask(self, mask: Any, hidden_states: Tensor) -> bool:
        """Takes the padding mask that the block was given.

        Args:
            mask: the mask, or None.
            hidden_states: what the block was given.

        Returns:
            False where its variant takes no mask, or another one.
        """
        if not self.variant.has_mask or not is_mask(mask, hidden_states.size(0), hidden_states.device):
            return False
        self.replace_mask(mask)  # a block may be called again
        return True

    def replace_mask(self, mask: Tensor | None) -> None:
        """Takes another padding mask, or none, in place of the one that there is."""
        before = self.sources if self.mask is None else self.sources[:-1]
        self.mask, self.sources = mask, before if mask is None else [*before, mask.contiguous()]
        self._canonical_mask = None

    def canonical_mask(self) -> Tensor | None:
        """The canonical pack's padding mask, as staging writes it; made at the first request."""
        has_mask = self.mask is not None or self._rules.masks_tail
        if not has_mask or self._rules.pads_at_entry or self.is_as_given:
            return self.mask
        if self._canonical_mask is None:
            self._canonical_mask = self._padded_mask(self.mask)
        return self._canonical_mask

    def _padded_mask(self, mask: Tensor | None) -> Tensor:
        given = None if mask is None else mask.flatten()
        return mask_content(self.capacity.tokens, given, self.row_offsets[-1:])[None]

    def constant_params(self) -> Any:
        """What the model is given: the canonical pack's constants and the offsets as given.

        It is what the code around the layers needs, and costs no work on the device. The pack as it was given
        where that was decided before.
        """
        if self._entered is None:
            offsets = self.sources[0], self._given.cu_seqlens_q_padded
            self._entered = self.params if self.is_as_given else self._with_offsets(*offsets)
        return self._entered

    def _with_offsets(self, actual: Tensor, padded: Tensor | None) -> Any:
        params_type: Any = type(self.params)
        offsets = canonical_offsets(actual, padded, self.variant.form)
        params = params_type(**offsets, **self.variant.constants(params_type))
        if self.variant.has_seq_idx:
            put_seq_idx(params, self.params.seq_idx, self.capacity.tokens)
        if len(self.params.__dict__) > len(fields_of(params_type)):
            copy_foreign_attributes(self.params, params)
        return params

    def pad(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [T, 1, H] as the capacity's rows, zero past the pack's physical end."""
        if self.is_as_given and self._rules.needs_every_row:
            require_rows(self.capacity.tokens, self.tokens, EagerReason.SIGNATURE_CHANGED)
        if self._rules.pads_at_entry or self.is_as_given:
            return hidden_states
        return ops.zero_tail(hidden_states, self.row_offsets, self.capacity.tokens)

    def cut(self, hidden_states: Tensor) -> Tensor:
        """As many rows as were given."""
        if self._rules.pads_at_entry or hidden_states.size(0) == self.tokens:
            return hidden_states
        return ops.zero_tail(hidden_states, self.row_offsets, self.tokens)

    def first_rows(self, hidden_states: Tensor) -> Tensor:
        """The same rows as a view, whatever they hold past the pack's end."""
        if self._rules.pads_at_entry or hidden_states.size(0) == self.tokens:
            return hidden_states
        return hidden_states.narrow(0, 0, self.tokens)
