# SPDX-License-Identifier: Apache-2.0
"""Packs: reading and padding their metadata, and the ops over them. Knows no Megatron."""
