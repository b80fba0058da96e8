"""Run `archipelago` as `python -m archipelago.ops`."""

import sys

from archipelago.ops.cli import main

sys.exit(main())
