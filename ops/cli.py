"""The entry point of the command `archipelago`. It imports next to nothing before it handles Ctrl-C.

Until a verb's code is loaded, Ctrl-C ends the process at once, because nothing has been started that needs an end. From
then on it raises KeyboardInterrupt, until the verb handles signals itself.
"""

import os
import signal
import sys
from types import FrameType

#: The exit status of a command that Ctrl-C ended, as shells report it.
INTERRUPTED = 130


def main() -> int:
    """Run the command `archipelago`."""
    signal.signal(signal.SIGINT, _end)
    # Numpy reads this when it is loaded. Its threads wait busily, and slow down a machine that does other work, too.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from archipelago.broker.process import guarded, interruptible
    from archipelago.ops.commands import run

    status = guarded(lambda: run(sys.argv[1:], interruptible))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # The interpreter's own end would print a traceback.
    return status


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
