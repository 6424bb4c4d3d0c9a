# SPDX-License-Identifier: Apache-2.0
"""Benchmarks on a GPU: `python -m benchmarks [NAME ...]` prints a table, writes results/NAME.json.

`bench_NAME.py` is benchmark NAME: what it compares, with its bars. Only `subjects/inside.py` knows the
plugin's insides. Whatever would disturb something else is one of `PARTS` of its benchmark, which
`measuring/children.py` measures in a process of its own, which prints the answer as JSON.
"""
