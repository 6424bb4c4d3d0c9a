# SPDX-License-Identifier: Apache-2.0
"""Why a call runs eager, which capacity holds a pack, what is in flight."""
