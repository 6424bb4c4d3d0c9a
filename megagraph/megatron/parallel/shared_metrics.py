# SPDX-License-Identifier: Apache-2.0
"""Metrics of experts from packs that other ranks share than the model's own: as if those had shared them.

Every rank that shares a pack records its part of a router's loss. At the end of a step Megatron adds the
parts up over one group, and takes the mean over all others. That is right for packs which the ranks of that
group share; a part of any other pack would count too little, or too often.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from megagraph.megatron.seams import metric_group, moe_metrics, set_metric_group

__all__ = ["counted_as_shared_by"]


@contextlib.contextmanager
def counted_as_shared_by(own: Any, shown: Any, times: float) -> Iterator[None]:
    """Around what runs a pack.

    Args:
        own: the group over which metrics are added up.
        shown: the one that routers see meanwhile.
        times: how many ranks share the pack, for each rank of `own`.
    """
    before = {} if times == 1 else {name: values.clone() for name, values in moe_metrics().items()}
    try:
        yield
    finally:
        for name, values in moe_metrics().items():
            group = metric_group(name)
            if group is not own and group is not shown:
                continue  # a mean of its own, or over all ranks
            set_metric_group(name, own)
            if times != 1:
                earlier = before.get(name, 0)
                values.sub_(earlier).mul_(times).add_(earlier)
