# SPDX-License-Identifier: Apache-2.0
"""Whole training steps: a trainer whose schedule is timed by itself, and Megatron's own graphs."""
