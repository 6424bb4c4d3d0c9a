# SPDX-License-Identifier: Apache-2.0
"""Random models, hosts and changes, by seed: after each event graphs have the bits of eager.

    python -m tests.soak --seed 1 --seconds 600

Runs scenarios until the time is over; what fails is made as short as it can be, and told. A scenario is a
model, options of the plugin and a list of events: plain data that a seed draws (`scenarios.py`) from kinds
(`models.py`) and a table (`events.py`). `twins.py` runs one on two models of the same weights.
"""

import argparse
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--events", type=int, default=40, help="of each scenario")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all; 0 runs one scenario")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--replay", type=Path, help="run the scenario of this file alone")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path[:0] = [str(FOLDER), str(FOLDER / "megatron")]
    import conftest  # chooses the release of megatron-core

    conftest.import_core()
    from .campaign import Campaign

    return Campaign(options).run()


if __name__ == "__main__":
    raise SystemExit(main())
