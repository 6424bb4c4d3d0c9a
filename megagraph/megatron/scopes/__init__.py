# SPDX-License-Identifier: Apache-2.0
"""One file for each scope: what enters a graph, what leaves it, what is restored."""
