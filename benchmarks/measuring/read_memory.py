# SPDX-License-Identifier: Apache-2.0
"""Reads how much memory of the device is in use beside torch's."""

import torch


def outside_bytes() -> int:
    """Device memory in use that torch's allocator does not hold, of every process."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free - torch.cuda.memory_reserved())
