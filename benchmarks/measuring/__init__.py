# SPDX-License-Identifier: Apache-2.0
"""How benchmarks measure: clocks, processes, figures, and the file they write."""
