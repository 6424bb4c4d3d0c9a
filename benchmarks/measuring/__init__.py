# SPDX-License-Identifier: Apache-2.0
"""How benchmarks measure: clocks, kernels, bare launches, timelines, processes, and the file they write."""
