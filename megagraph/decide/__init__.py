# SPDX-License-Identifier: Apache-2.0
"""Pure decisions, without torch: why a call runs eager, and which capacity holds a pack."""
