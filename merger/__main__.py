"""`python -m merger`."""

import sys

from merger.main import entry

sys.exit(entry())
