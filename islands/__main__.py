"""Run an island with `python -m archipelago.islands`."""

import gc
import sys

gc.disable()  # looking through everything that is imported takes a tenth of the start (see `end_of_imports`)

from archipelago.islands.main import entry  # noqa: E402

sys.exit(entry())
