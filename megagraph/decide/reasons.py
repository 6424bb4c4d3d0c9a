# SPDX-License-Identifier: Apache-2.0
"""Why a call runs eager: the closed list of reasons."""

import enum

__all__ = ["EagerReason", "Why"]


class EagerReason(enum.IntEnum):
    """Why a call ran eager. Closed: the C++ core lists the same names in the same order."""

    DISABLED = 0
    WARMING_UP = 1
    NO_PACK_METADATA = 2
    TOO_MANY_SEQUENCES = 3
    TOO_MANY_TOKENS = 4
    SEQUENCE_TOO_LONG = 5
    CP_SIZE_NOT_CAPTURED = 6
    SIGNATURE_CHANGED = 7
    NO_FREE_SLOT = 8
    SCOPE_UNSUPPORTED = 9
    RECOMPUTING = 10
    CAPTURE_FAILED = 11
    ADDRESS_MOVED = 12
    GROUP_DISAGREED = 13
    NESTING = 14
    NUMERICS_CHANGED = 15
    PARAMETERS_CHANGED = 16
    FOREIGN_HOOK = 17
    SHARED_PARAMETER = 18
    RNG_NOT_GRAPH_SAFE = 19
    SUSPENDED = 20
    RELEASED = 21
    STATE_CHANGED = 22
    VERIFY_FAILED = 23
    EXPERT_OVERLAP = 24


# With what is the matter, in words.
Why = tuple[EagerReason, str]
