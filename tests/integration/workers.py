"""Workers for tests: in this process, on a thread, with the null model."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from uuid import uuid4

from sluice.worker.config import load_config
from sluice.worker.connection.clients import Connections
from sluice.worker.errors import ExitCode
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel
from sluice.worker.serve.daemon import Daemon
from sluice.worker.serve.start import build

FAST: dict[str, object] = {
    "model.path": "null",
    "history.recorder": False,
    "metrics.enabled": False,
    "beat.every_s": 0.25,
    "beat.life_s": 1.0,
    "log.level": "error",
}


class RunningWorker:
    """A daemon on a thread. Changes: it can be asked to stop."""

    def __init__(self, url: str, flags: dict[str, object], change: Callable[[LocalModel], LocalModel]) -> None:
        config = load_config({}, flags={"redis.url": url, **FAST, **flags})
        self.incarnation = uuid4().hex
        self._connections = Connections(url, timeout_s=config.redis.timeout_s)
        self.daemon: Daemon = build(
            config,
            self._connections,
            change(load(config)),
            self.incarnation,
        )
        self.exit_code: ExitCode | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.exit_code = self.daemon.run()
        finally:
            self._connections.stop()

    def stop(self) -> ExitCode | None:
        """Drain the worker, and wait until it ends."""
        self.daemon.stop()
        self._thread.join(30)
        return self.exit_code

    def hurry(self) -> None:
        """Ask once more."""
        self.daemon.stop()


@contextmanager
def running_worker(
    url: str, *, change: Callable[[LocalModel], LocalModel] = lambda served: served, **flags: object
) -> Generator[RunningWorker]:
    """A worker that is drained at the end; flags by `section__name`; `change` has the model that it loaded."""
    worker = RunningWorker(url, {name.replace("__", "."): value for name, value in flags.items()}, change)
    try:
        yield worker
    finally:
        worker.stop()
        worker.hurry()
