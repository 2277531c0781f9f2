"""A batch of many lines: processor time of the gateway and of `worker callbacks` until it is accepted, and written out.

The queue is paused until all jobs are in it. The worker of the null model is in no figure.
"""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from benchmarks.gateway.parts import Served, served
from benchmarks.queue.processor_time import process_s
from benchmarks.service.parts import wait_until
from sluice.producer.client import Producer
from sluice.producer.contract.keys import QueueKeys

CHAT = "/v1/chat/completions"
LIMIT_S = 1200.0
WARM_UP = 10
"""Lines of a batch before the one that is measured: the task's process must have started."""

OVER = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """Processor time of one batch."""

    num_lines: int
    accepted_s: float
    """From the upload until every job is in the queue."""

    written_s: float
    """From then until its output can be read."""

    def __str__(self) -> str:
        return (
            f"a batch of {self.num_lines} lines: {self.accepted_s:.1f} s of processor time until it is validated and "
            f"accepted, {self.written_s:.1f} s until it is written out"
        )


def batch_file(num_lines: int) -> Batched:
    """Run one batch."""
    with served(model="null") as here, _callbacks(here) as callbacks, Producer() as producer:

        def used_s() -> float:
            return process_s(here.pid) + _tree_s(callbacks.pid)

        with httpx.Client(base_url=f"http://127.0.0.1:{here.port}", timeout=LIMIT_S) as http:
            _wait_for_end(http, _begin(http, WARM_UP), WARM_UP)
            producer.pause()
            began_s = used_s()
            batch = _begin(http, num_lines)
            wait_until(lambda: _num_submitted(here) == WARM_UP + num_lines, "all jobs", every_s=0.2, limit_s=LIMIT_S)
            accepted_s = used_s()
            producer.pause(is_paused=False)
            _wait_for_end(http, batch, num_lines)
        return Batched(num_lines=num_lines, accepted_s=accepted_s - began_s, written_s=used_s() - accepted_s)


def _tree_s(pid: int) -> float:
    # By parent: each task of rq runs in a process group of its own.
    children = psutil.Process(pid).children(recursive=True)
    return process_s(pid) + sum(process_s(child.pid) for child in children if child.is_running())


def _begin(http: httpx.Client, num_lines: int) -> str:
    content = "".join(json.dumps(_line(number)) + "\n" for number in range(num_lines)).encode()
    uploaded = http.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    wanted = {"input_file_id": uploaded.raise_for_status().json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return http.post("/v1/batches", json=wanted).raise_for_status().json()["id"]


def _line(number: int) -> dict[str, Any]:
    body = {"model": "null", "messages": [{"role": "user", "content": f"Name river {number}."}], "max_tokens": 4}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def _wait_for_end(http: httpx.Client, batch: str, num_lines: int) -> None:
    wait_until(lambda: _look(http, batch)["status"] in OVER, "the batch", every_s=0.5, limit_s=LIMIT_S)
    found = _look(http, batch)
    if found["status"] != "completed" or found["request_counts"]["completed"] != num_lines:
        raise RuntimeError(f"the batch ended otherwise: {found}")


def _look(http: httpx.Client, batch: str) -> Any:  # noqa: ANN401 - JSON
    return http.get(f"/v1/batches/{batch}").raise_for_status().json()


def _num_submitted(here: Served) -> int:
    return int(here.server.client.hget(QueueKeys("default").key("counters"), "submitted") or 0)


@contextmanager
def _callbacks(here: Served) -> Generator["subprocess.Popen[bytes]"]:
    run = [sys.executable, "-P", "-m", "sluice.worker"]
    with (here.server.folder / "callbacks.log").open("wb") as log:
        subprocess.run([*run, "migrate"], check=True, stdout=log, stderr=log)
        process = subprocess.Popen([*run, "callbacks"], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)
