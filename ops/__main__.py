"""`python -m archipelago.ops`: the same as `archipelago`."""

import sys

from archipelago.ops.cli import main

sys.exit(main())
