# SPDX-License-Identifier: Apache-2.0
"""Documents in, packs out, and a small training loop over them: what the demo, tests and benchmarks train."""
