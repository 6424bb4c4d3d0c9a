# SPDX-License-Identifier: Apache-2.0
"""How a command ends."""

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """The exit codes of `megagraph`; under `megagraph run`, the script's own come first."""

    FINE = 0
    BITS_DIFFER = 1
    BAD_INPUT = 2  # argparse's own as well
    NOTHING_REPLAYED = 3
    CRASHED = 70  # EX_SOFTWARE of sysexits.h: Python's own 1 would read as bits that differ
