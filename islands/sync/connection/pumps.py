"""Pumps: threads that work with the broker beside the caller's own work, and retry after outages."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from archipelago.broker.errors import BrokerError, WireError

#: Seconds between two attempts, by the number of failures in a row.
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
#: After this many refusals of its credentials in a row, about 15 s, an island leaves: they have been revoked.
REFUSALS_MAX = 10
#: The code of such a refusal.
REFUSED = "broker.access"
#: A thread waits so long for Python's lock, at most, while a training loop computes in Python. By default it is 5 ms,
#: for each of the hundreds of operations that take a snapshot apart.
SWITCH_SECONDS = 0.0005

log = logging.getLogger(__name__)


@dataclass
class Pump:
    """One kind of work.

    Attributes:
        work: Does everything that is pending, without waiting for more.
        wait_seconds: How long its thread rests between two calls unless it is woken; None rests until it is woken.
        patient_work: Called by its thread instead of `work`; it may wait for more work.
        wake: Set this to wake the thread.
        trouble: Its last error, until a call succeeds.
        refusals: How many calls in a row were refused for their credentials.
    """

    name: str
    work: Callable[[], None]
    wait_seconds: float | None = None
    patient_work: Callable[[], None] | None = None
    wake: threading.Event = field(default_factory=threading.Event)
    trouble: str = ""
    refusals: int = 0


class Pumps:
    """The pumps of one island. After an outage they retry forever. Any other error stops them and is kept in `failure`.

    Credentials that the broker refuses again and again are no outage.

    Attributes:
        failure: An error that a retry cannot fix. The island stops on it.
    """

    def __init__(
        self, pumps: Sequence[Pump], changed: threading.Condition, meanwhile: str = "training continues"
    ) -> None:
        """Create pumps that do not run yet; `changed` is notified of a failure. `meanwhile` is for log messages."""
        self._pumps, self._meanwhile = pumps, meanwhile
        self._changed = changed
        self.failure: Exception | None = None
        self._stopping = threading.Event()
        self.threads: list[threading.Thread] = []

    @property
    def trouble(self) -> str:
        """The last error of any failing pump; empty if none fails."""
        return next((pump.trouble for pump in self._pumps if pump.trouble), "")

    def run_once(self) -> None:
        """Run each pump once in the calling thread, without waiting. After an outage, pending work is kept."""
        for pump in self._pumps:
            self._attempt(pump, pump.work)

    def start(self) -> None:
        """Start one thread for each pump."""
        sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        for pump in self._pumps:
            thread = threading.Thread(target=self._keep_pumping, args=(pump,), name=f"link-{pump.name}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def stop(self, seconds: float = 5.0) -> None:
        """End the threads within `seconds`. A thread that hangs in a call is left behind and ends with the process.

        Python ends such a thread wherever it is, and in the middle of PyTorch's code that aborts the process.
        """
        self._stopping.set()
        for pump in self._pumps:
            pump.wake.set()
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _keep_pumping(self, pump: Pump) -> None:
        failures = 0
        while not self._stopping.is_set():
            if self._attempt(pump, pump.patient_work or pump.work):
                failures = 0
                if pump.patient_work is None:
                    pump.wake.wait(pump.wait_seconds)
                    pump.wake.clear()
            else:
                self._stopping.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1

    def _attempt(self, pump: Pump, work: Callable[[], None]) -> bool:
        try:
            work()
        except (BrokerError, WireError) as error:
            if not self.trouble and not self._stopping.is_set():  # the owner may have closed the connection
                log.warning("the link is down, %s: %s", self._meanwhile, error.what)
            pump.trouble = error.what[:500]
            pump.refusals = pump.refusals + 1 if error.code == REFUSED else 0
            if pump.refusals >= REFUSALS_MAX:
                self._fail(error)
            return False
        except Exception as error:  # noqa: BLE001 - the island raises it, so that no thread dies unnoticed
            self._fail(error)
            return False
        was_in_trouble, pump.trouble, pump.refusals = bool(pump.trouble), "", 0
        if was_in_trouble and not self.trouble:
            log.info("the link is up again")
        return True

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
