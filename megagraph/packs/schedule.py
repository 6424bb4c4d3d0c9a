# SPDX-License-Identifier: Apache-2.0
"""Says which documents of a step run together, on which ranks and in which micro-batch.

The deciding is in csrc/decide/pack_schedule.h, Note [Schedules of packs]; what a rank counts is its place
among the ranks that share one global batch. Which rows of a document a rank has is the zigzag layout of
`megagraph.packs.ops.thd_partition_indices`.
"""

from collections.abc import Mapping

from torch import Tensor

from megagraph._C import PackSchedule, ScheduledPack, ScheduleLimits, schedule_packs, share

__all__ = ["Document", "PackSchedule", "ScheduleLimits", "ScheduledPack", "schedule_packs", "share"]

Document = Mapping[str, Tensor]
"""What belongs to each token of a document, by name: tensors [L] of any dtypes, on one device."""
