# SPDX-License-Identifier: Apache-2.0
"""What benchmarks train on: models, packs and documents."""
