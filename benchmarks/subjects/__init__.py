# SPDX-License-Identifier: Apache-2.0
"""What benchmarks measure: models, packs, steps and layers, ours and others'."""
