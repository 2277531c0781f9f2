"""A queue with a worker, a gateway and `worker callbacks`, for batches."""

import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
from openai.types import Batch

from sluice.history.database import open_database
from sluice.worker.recorder.migrate import migrate
from tests.forks import Fork, Process
from tests.gateway.gateway_process import GatewayProcess, gateway_process

PATIENCE_S = 60.0
ENDPOINT = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True)
class Place:
    """Where the processes of a test are."""

    redis_url: str
    database_url: str
    files_url: str
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """The environment of its processes."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        return own | {
            "SLUICE_REDIS_URL": self.redis_url,
            "SLUICE_DATABASE_URL": self.database_url,
            "SLUICE_FILES_URL": self.files_url,
            "SLUICE_LOG_FORMAT": "json",
        }

    @contextmanager
    def gateway(self, *arguments: str) -> Generator[GatewayProcess]:
        """A gateway."""
        given = ("--files-url", self.files_url, *arguments)
        with gateway_process(self.redis_url, *given, database_url=self.database_url) as made:
            yield made

    @contextmanager
    def callbacks(self) -> Generator[Fork]:
        """`worker callbacks`, killed with its children at the end."""
        log = self.folder / f"callbacks-{time.monotonic_ns()}.log"
        process = Fork(("sluice.worker", "callbacks"), self.environ, log)
        try:
            yield process
        finally:
            kill_all(process)


class Callbacks:
    """A `worker callbacks` that tests may kill. Changes as it is started again."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        """Start it."""
        self._running.enter_context(self._place.callbacks())

    def kill(self) -> None:
        """Kill it with its children."""
        self._running.close()


def place_in(folder: Path, redis_url: str) -> Place:
    """A place with a new database."""
    url = f"sqlite:///{folder / 'history.db'}"
    engine = open_database(url, is_writer=True)
    migrate(engine)
    engine.dispose()
    return Place(redis_url, url, (folder / "files").as_uri(), folder)


def kill_all(process: Process) -> None:
    """Kill a process and its children."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        for child in family:
            child.kill()
    process.wait(10)


def chat_line(custom_id: str, **changes: Any) -> dict[str, Any]:  # Any: JSON
    """A line of a batch's file."""
    body = {"model": "null", "messages": [{"role": "user", "content": f"say {custom_id}"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body | changes}


def encoded(lines: Iterable[object]) -> bytes:
    """Lines as a file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def numbered(count: int, **changes: Any) -> bytes:  # Any: JSON
    """A file with so many lines."""
    return encoded(chat_line(f"c-{number}", **changes) for number in range(count))


def begun(client: openai.OpenAI, content: bytes, **changes: Any) -> Batch:  # Any: arguments of several types
    """Upload a file and create its batch."""
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    arguments: dict[str, Any] = {"endpoint": ENDPOINT, "completion_window": "24h", **changes}
    return client.batches.create(input_file_id=file.id, **arguments)


def until(client: openai.OpenAI, batch: Batch, *statuses: str, patience_s: float = PATIENCE_S) -> Batch:
    """Poll a batch until it has one of these statuses; without any, until it is over."""
    return until_it(client, batch, lambda found: found.status in (statuses or OVER), patience_s=patience_s)


def until_it(
    client: openai.OpenAI, batch: Batch, is_right: Callable[[Batch], bool], *, patience_s: float = PATIENCE_S
) -> Batch:
    """Poll a batch until it is as expected."""
    deadline_s = time.monotonic() + patience_s
    while not is_right(found := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)  # between two polls
    return found


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:  # Any: JSON
    """The lines of a file; none without a file."""
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def ids_of(client: openai.OpenAI, batch: Batch) -> list[str]:
    """The custom ids of both files of a batch, sorted."""
    both = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
    return sorted(line["custom_id"] for line in both)


def kept_objects(place: Place) -> set[str]:
    """The objects in the place's folder."""
    folder = Path(place.files_url.removeprefix("file://"))
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name[0] != "."}
