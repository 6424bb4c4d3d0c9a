# SPDX-License-Identifier: Apache-2.0
"""Packs: the ops over them, and their schedule. Knows no Megatron."""
