# SPDX-License-Identifier: Apache-2.0
"""What a captured variant can hold, what a pack needs, what a pipeline has in flight; csrc/decide decides.

Capacities are configured, or learned from the packs of a warm-up.
"""

import torch  # noqa: F401  # whose libraries the core needs

from megagraph._C import Capacity, PackForm, PackShape, StageSchedule, VariantKey, capacities_for, needs_of

__all__ = ["Capacity", "PackForm", "PackShape", "StageSchedule", "VariantKey", "capacities_for", "needs_of"]
