"""Run `archipelago` as `python -m archipelago`."""

import sys

from archipelago.ops.cli import main

sys.exit(main())
