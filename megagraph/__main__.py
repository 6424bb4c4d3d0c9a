# SPDX-License-Identifier: Apache-2.0
"""`python -m megagraph`."""

import sys

from megagraph.cli import main

sys.exit(main())
