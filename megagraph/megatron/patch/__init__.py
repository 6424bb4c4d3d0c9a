# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of functions of megatron-core."""
