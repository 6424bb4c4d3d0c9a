# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [NAME ...]`: runs benchmarks and writes benchmarks/results/NAME.json."""

import argparse
import importlib
import sys

import torch

NAMES = ("main_job", "real_hosts", "megatron_loop")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    names = parser.parse_args().names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"expected one of {', '.join(NAMES)}, got {name!r}")
    if not torch.cuda.is_available():
        print("benchmarks measure CUDA graphs and need a GPU; none is here", file=sys.stderr)
        return 2
    for name in names:
        importlib.import_module(f"benchmarks.{name}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
