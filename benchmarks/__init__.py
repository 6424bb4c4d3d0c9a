# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each writes benchmarks/results/NAME.json."""
