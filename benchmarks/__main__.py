# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [NAME ...]`: runs benchmarks, prints them, writes NAME.json.

With `--show` it prints what NAME.json holds, and runs nothing. These lie in benchmarks/results, or OUT.
"""

import argparse
import importlib
import sys
import time

import torch

from benchmarks.measuring.results import FOLDER, measure, read_figures, show

# Benchmark NAME is the module bench_NAME. Together these take a few minutes on one GPU:
DEFAULT = ("replay", "rope", "attention", "capture", "memory", "step")
# These take longer.
FURTHER = (
    *("gain", "training", "bits", "scopes", "experts", "paged_stash", "pipeline", "ep_overlap"),
    *("delayed_weights", "soak"),
)
NAMES = DEFAULT + FURTHER


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: {', '.join(DEFAULT)}"
    )
    parser.add_argument("--show", action="store_true", help="print the results of earlier runs as Markdown")
    options = parser.parse_args()
    names = options.names or DEFAULT
    if options.show:
        for name in names:
            show(name, read_figures(FOLDER / f"{name}.json"))
        return 0
    for name in names:
        if name not in NAMES:
            parser.error(f"expected one of {', '.join(NAMES)}, got {name!r}")
    if not torch.cuda.is_available():
        print("benchmarks measure CUDA graphs and need a GPU; none is here", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            measure(FOLDER / f"{name}.json", importlib.import_module(f"benchmarks.bench_{name}").FIGURES)
        except Exception as error:  # the others are measured nevertheless
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
