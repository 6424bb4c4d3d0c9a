# SPDX-License-Identifier: Apache-2.0
"""The graphs of one model."""
