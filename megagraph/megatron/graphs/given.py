# SPDX-License-Identifier: Apache-2.0
"""Reads packs as they are given: what their shapes and host integers say, whatever state the model is in."""

from typing import Any, NamedTuple

from megagraph.decide.dispatch import Capacity, PackShape
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.capacities import Capacities
from megagraph.packs.packing import PackForm, TailConvention, has_own_cp_group, pack_shape

__all__ = ["GivenPack", "PackReader"]

_NO_PACK_METADATA = EagerReason.NO_PACK_METADATA


class GivenPack(NamedTuple):
    """A pack that some graph may take.

    Args:
        params: the `PackedSeqParams`.
        shape: what it needs.
        form: which fields it carries.
        capacity: holds it; None while capacities are still to be learned.
    """

    params: Any
    shape: PackShape
    form: PackForm
    capacity: Capacity | None


class PackReader:
    """Reads the packs of one model.

    Args:
        capacities: of its graphs.
        tail: the convention of its canonical packs.

    Attributes:
        refused: why the model takes no graph at all, or None.
    """

    def __init__(self, capacities: Capacities, tail: TailConvention) -> None:
        self._capacities = capacities
        self._tail = tail
        self.refused: EagerReason | None = None

    def read(self, params: Any, tokens: int) -> GivenPack | EagerReason:
        """Reads a micro-batch.

        Args:
            params: its `PackedSeqParams`, or None.
            tokens: physical tokens of its input.

        Returns:
            The pack; or why no graph of the model can take it.
        """
        if self.refused is not None:
            return self.refused
        shape = None if params is None else pack_shape(params, tokens, self._tail)
        if shape is None:
            return _NO_PACK_METADATA
        form = PackForm.of(params)
        if form is None:
            return EagerReason.SIGNATURE_CHANGED
        capacity = self._capacities.decide(shape)
        if isinstance(capacity, EagerReason):
            return capacity
        if has_own_cp_group(params):
            return EagerReason.CP_SIZE_NOT_CAPTURED
        return GivenPack(params, shape, form, capacity)
