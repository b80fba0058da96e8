"""`python -m archipelago.merger`."""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded; `merger.spectra` has threads of its own

from archipelago.merger.main import entry

sys.exit(entry())
