# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, most on a GPU: `python -m benchmarks [NAME ...]` prints a table, writes results/NAME.json.

- `bench_NAME.py` is benchmark NAME: what it compares, with its bars. `__main__.py` lists the names.
- `plot.py` draws the results.
- `measuring/`: clocks, processes, figures and the written file.
- `subjects/`: models and packs, steps, layers, pipelines, ours and others'. Only `inside.py` knows the
  plugin's insides.

Whatever would disturb something else is one of `PARTS` of its benchmark: `measuring/children.py` measures it
in a process of its own, which prints the answer as JSON.
"""
