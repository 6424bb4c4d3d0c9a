# SPDX-License-Identifier: Apache-2.0
"""Host time of a graphed layer: ours, and the same layers as others run them."""
