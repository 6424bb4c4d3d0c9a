# SPDX-License-Identifier: Apache-2.0
"""Scopes: what enters a graph, what leaves it, what is restored, and how a block walks over them."""
