# SPDX-License-Identifier: Apache-2.0
"""Benchmarks on a GPU: `python -m benchmarks [NAME ...]` writes benchmarks/results/NAME.json.

- `bench_NAME.py` is benchmark NAME: what it compares, with its bars. `__main__.py` lists the names.
- `plot.py` draws the results.
- `measuring/`: clocks, kernels, bare launches, timelines, memory, child processes, figures, the written file.
- `packs/`: the models and packs that are measured.
- `attention/`: attention in a bank's graphs.
- `replay/`: host time of a graphed layer, ours and others'; for `replay` and `capture`.
- `step/`: a trainer whose schedule is timed by itself; for `step` and `memory`.
- `hosts/`: jobs of one or more ranks, Megatron's own loop, and what Megatron's own graphs ask for.

Whatever would disturb something else is measured in a process of its own, as `python -m MODULE PART`,
which prints its answer as one line of JSON.
"""
