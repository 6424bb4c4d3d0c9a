# SPDX-License-Identifier: Apache-2.0
"""The graphs of any modules that run one after another, and their life. Knows neither Megatron nor packs."""
