# SPDX-License-Identifier: Apache-2.0
"""Random models, hosts and changes, by seed: after each event graphs have the bits of eager.

    python -m tests.soak --seed 1 --seconds 600

A scenario is a model, options of the plugin and a list of events, all of it plain data that a seed draws
(`scenarios.py`) from the kinds of `models.py` and the table of `events.py`; what fails is made as short as it
can be. `twins.py` runs one on two models of the same weights.
"""
