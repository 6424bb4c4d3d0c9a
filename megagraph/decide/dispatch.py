# SPDX-License-Identifier: Apache-2.0
"""What a captured variant can hold, what a pack needs, and the name of a variant; csrc/decide decides."""

import torch  # noqa: F401  # whose libraries the core needs

from megagraph._C import Capacity, PackForm, PackShape, VariantKey

__all__ = ["Capacity", "PackForm", "PackShape", "VariantKey"]
