# SPDX-License-Identifier: Apache-2.0
"""How benchmarks measure: clocks, kernels, child processes, comparisons, and the file they write."""
