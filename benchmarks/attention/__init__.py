# SPDX-License-Identifier: Apache-2.0
"""Attention over packs: in a bank's graphs."""
