"""`python -m ops`: the same as `archipelago`."""

import sys

from ops.cli import main

sys.exit(main())
