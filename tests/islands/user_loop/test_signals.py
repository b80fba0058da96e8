"""SIGTERM while a script is an island. `test_session` has what the island does about it."""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os, signal, sys, time
from archipelago.islands.sync.leaving import StopSignal
stop = StopSignal()
stop.watch()
begun, begin = os.pipe()
child = os.fork()
if not child:
    os.write(begin, b"1")  # Python forgets signals that arrive before a forked process runs its first instruction
    while True:
        time.sleep(0.01)  # a signal that arrives just before a sleep is handled after it
os.read(begun, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM and not stop.has_arrived
assert "jax" not in sys.modules
os.kill(os.getpid(), signal.SIGTERM)
assert stop.has_arrived
stop.release()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
other = StopSignal()
other.watch()
own = lambda *_: None
signal.signal(signal.SIGTERM, own)
other.release()
assert signal.getsignal(signal.SIGTERM) is own, "a handler that the script has set since"
other.watch()
assert signal.getsignal(signal.SIGTERM) is own, "a handler that the script had before"
"""


def test_forked_processes_end_at_once() -> None:
    """A data loader ends its workers by SIGTERM, and they inherit the handler."""
    subprocess.run([sys.executable, "-c", FORKED], check=True)
