# SPDX-License-Identifier: Apache-2.0
"""What a captured variant can hold, what a pack needs, what a pipeline has in flight; csrc/decide decides.

Capacities are configured, learned from the packs of a warm-up, or chosen for packs that were counted.
"""

import torch  # noqa: F401  # whose libraries the core needs

from megagraph._C import (
    Capacity,
    PackForm,
    PackShape,
    StageSchedule,
    VariantKey,
    best_capacities,
    capacities_for,
    needs_of,
)

__all__ = [
    "Capacity",
    "PackForm",
    "PackShape",
    "StageSchedule",
    "VariantKey",
    "best_capacities",
    "capacities_for",
    "needs_of",
]
