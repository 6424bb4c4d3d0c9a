# SPDX-License-Identifier: Apache-2.0
"""What parallelism asks of graphs."""
