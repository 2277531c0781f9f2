"""Start the embedded server again when it dies: the worker that uses it is often the only one to notice."""

import threading

from sluice.protocol.errors import EmbeddedServerError
from sluice.protocol.redis import embedded
from sluice.worker.log import Log

EVERY_S = 0.5


class EmbeddedKeeper:
    """A watch over the embedded server, on a thread of its own."""

    def __init__(self, use: embedded.Use, log: Log) -> None:
        self._use = use
        self._log = log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._use.has_started:
            self._log.info("embedded server started; it stops with its last user", url=self._use.url)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. A start under way is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        complaint = ""
        while not self._closing.wait(EVERY_S):
            if embedded.accepts(self._use.embedded):
                continue
            if embedded.state_of(self._use.embedded) is not embedded.ServerState.STOPPED:
                continue
            try:
                self._use.revive()
                self._log.warning("embedded server had stopped; started again", url=self._use.url)
            except EmbeddedServerError as error:
                if str(error) != complaint:
                    self._log.error("embedded server has stopped and cannot be started", error=str(error))
                complaint = str(error)
