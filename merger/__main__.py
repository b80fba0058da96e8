"""`python -m archipelago.merger`."""

import sys

from archipelago.merger.main import entry

sys.exit(entry())
