# SPDX-License-Identifier: Apache-2.0
"""What graphs rely on and that may change between steps."""
