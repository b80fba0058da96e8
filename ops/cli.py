"""The entry point of the command `archipelago`. It imports next to nothing before it handles Ctrl-C.

Until a verb's code is loaded, Ctrl-C ends the process at once, because nothing has been started that needs an end. From
then on it raises KeyboardInterrupt, until the verb handles signals itself.
"""

import os
import signal
import sys
from types import FrameType

#: Verbs that launchers start. They say by their exit status whether another try may succeed.
LAUNCHED = ("init", "island", "merger")


def main() -> int:
    signal.signal(signal.SIGINT, _end)
    if os.getpid() == 1:  # The first process of a container ignores every signal that it does not handle.
        signal.signal(signal.SIGTERM, _end)
    # Numpy reads this when it is loaded. Its threads wait busily, and slow down a machine that does other work, too.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from archipelago.broker.address import redacted
    from archipelago.broker.process import INTERRUPTED, guarded, interruptible
    from archipelago.ops.commands import run

    # Tell the person who types it. Logs, which programs read, stay as they are.
    if sys.stderr.isatty() and any("://" in word and redacted(word) != word for word in sys.argv[1:]):
        sys.stderr.write("warning: `ps` shows the password in this URL. Give a join file, or set $ARCHIPELAGO_URL.\n")
    is_launched = len(sys.argv) > 1 and sys.argv[1] in LAUNCHED
    status = guarded(lambda: run(sys.argv[1:], interruptible), supervised=is_launched)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # The interpreter's own end would print a traceback.
    if status == INTERRUPTED:  # XLA may still compile on threads of its own, which the interpreter's end would crash.
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)
    return status


def _end(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
