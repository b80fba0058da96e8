"""Run an island with `python -m archipelago.islands`."""

import sys

from archipelago.islands.main import entry

sys.exit(entry())
