# SPDX-License-Identifier: Apache-2.0
"""Why a call runs eager."""
