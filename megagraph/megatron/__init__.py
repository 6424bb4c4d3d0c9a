# SPDX-License-Identifier: Apache-2.0
"""The only floor that knows Megatron."""
