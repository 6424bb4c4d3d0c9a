# SPDX-License-Identifier: Apache-2.0
"""Real environments: jobs of one or more ranks, each in processes of its own, and Megatron's own loop."""
