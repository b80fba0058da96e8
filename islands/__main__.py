"""`python -m islands`."""

import sys

from islands.main import entry

sys.exit(entry())
