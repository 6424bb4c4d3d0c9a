# SPDX-License-Identifier: Apache-2.0
"""The graphs of any chain of modules, and their life. Knows neither Megatron nor packs."""
