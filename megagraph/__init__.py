# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for Megatron training on packed sequences: the same bits as eager, or a counted reason."""
