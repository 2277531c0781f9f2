"""Record a queue as programs of format 1 left it. Runs with their code, not with that of this tree: see README.md.

record_format_1.py SERVER_URL FILE
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack as untyped_msgpack  # pyright: ignore[reportMissingTypeStubs] (it ships none)
import redis

from sluice.protocol import calls
from sluice.protocol.calls import LeasedJob, QueueSettings
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, JobOptions, JobSpec, encode_spec
from tests.integration.jobs import Ask, new_job, num_on_channel, wait_for_ends, wait_until
from tests.integration.workers import running_worker
from tests.protocol.driving import Queue, Worker, ending

msgpack: Any = untyped_msgpack
KEYS = QueueKeys("default")
YEARS_MS = 10 * 365 * 24 * 3600 * 1000
SLOW = "null?step_s=0.005"


class Recorder:
    """Submits jobs of all kinds. Changes: it notes what was asked."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.queue = Queue(client, KEYS)
        self.jobs: list[dict[str, Any]] = []

    def ask(
        self, name: str, becomes: str, *, tenant: str = "t", n: int = 1, max_tokens: int = 8, **changes: Any
    ) -> JobId:
        seed = 100 + len(self.jobs)
        ask = Ask(prompt=name, options=JobOptions(max_tokens=max_tokens, n=n), seed=seed, tenant=tenant)
        job = replace(new_job(ask), id=JobId(f"0.{tenant}.{name}"), **changes)
        if batch := changes.get("batch"):
            job = replace(job, spec=encode_spec(JobSpec(options=ask.options, stream=True, batch=batch)))
        [answer] = run(self.client, calls.submit(KEYS, [job]))
        assert isinstance(answer, calls.Accepted), answer
        self.jobs.append(
            {
                "id": job.id, "prompt": name, "tenant": tenant, "n": n, "max_tokens": max_tokens, "seed": seed,
                "becomes": becomes, "class": job.priority, "key": changes.get("idempotency_key"),
                "batch": changes.get("batch"),
            }
        )  # fmt: skip
        return job.id

    def hold(self, incarnation: str, job_id: JobId) -> tuple[Worker, LeasedJob]:
        """Lease the job to a worker of this name, past a returned job that is too large for it."""
        worker = self.queue.worker(incarnation)
        worker.beat(expiry_ms=600_000)
        [job] = worker.pull(kv_tokens=20, cache_tokens=20).jobs
        assert job.id == job_id
        return worker, job


def record(it: Recorder, url: str) -> None:
    settings = QueueSettings(max_failures=5, keep_prompts="full", reserve_tokens=64, weights={"a": 2.5})
    run(it.client, calls.configure(KEYS, settings))
    record_ended(it, url)
    record_held(it)
    for number in range(6):
        it.ask(f"waiting{number}", "waiting", tenant="ab"[number % 2], priority=3 * (number // 4))
    it.ask("keyed", "waiting", idempotency_key="k-waiting")
    it.ask("batched", "waiting", batch="closed")
    it.ask("timed", "waiting", ttl_ms=YEARS_MS, deadline_ms=it.queue.look().server_ms + YEARS_MS)
    it.ask("later", "delayed", not_before_ms=it.queue.look().server_ms + 3_600_000, batch="open")
    run(it.client, calls.close_batch(KEYS, "closed", callback_url="http://127.0.0.1:1/batch"))
    for name in ("gone", "stopping"):
        run(it.client, calls.report_death(KEYS, name))


def record_ended(it: Recorder, url: str) -> None:
    failing = it.ask("failing", "failed")
    worker, job = it.hold("failed", failing)
    worker.advance(ending(job, 0, state=JobState.FAILED))
    worker.give_back(deregister=True)
    run(it.client, calls.cancel(KEYS, [it.ask("cancelled", "cancelled")]))
    done = [
        it.ask("done", "done", idempotency_key="k-done", batch="closed"),
        it.ask("two", "done", n=2, wants_callback=True),
    ]
    with running_worker(url, model__path=SLOW, drain__mode="hand-over"):
        wait_for_ends(it.client, done)
        begun = it.ask("begun", "returned", max_tokens=100, n=2)
        wait_until(lambda: num_on_channel(it.client, begun) >= 10, "it speaks")
    assert it.queue.state(begun) is JobState.QUEUED


def record_held(it: Recorder) -> None:
    suspect = it.ask("suspect", "suspect", priority=9)
    for name in ("first", "second"):
        it.hold(name, suspect)
        run(it.client, calls.report_death(KEYS, name))
    third = it.queue.worker("third")
    third.pull(kv_tokens=20, cache_tokens=20)
    third.give_back(deregister=True)
    assert it.client.zrange(KEYS.key("suspects"), 0, -1) == [suspect.encode()]
    it.hold("living", it.ask("running", "running"))
    it.hold("gone", it.ask("orphan", "orphan"))
    it.hold("stopping", stopped := it.ask("stopped", "stopped"))
    assert run(it.client, calls.cancel(KEYS, [stopped])) == ["asked"]


def dumped(client: Any) -> list[list[Any]]:
    """Each key as its name, its remaining time to live (0: none) and the command that writes it."""
    found: list[list[Any]] = []
    for key in sorted(client.scan_iter()):
        kind, ttl_ms = client.type(key).decode(), max(0, client.pttl(key))
        found.append([key, ttl_ms, *written(client, key, kind)])
    return found


def written(client: Any, key: bytes, kind: str) -> list[list[Any]]:
    match kind:
        case "string":
            return [["SET", key, client.get(key)]]
        case "hash":
            return [["HSET", key, *(part for pair in sorted(client.hgetall(key).items()) for part in pair)]]
        case "zset":
            scored = client.zrange(key, 0, -1, withscores=True)
            return [["ZADD", key, *(part for member, score in scored for part in (repr(score), member))]]
        case "stream":
            return [["XADD", key, entry, *(part for pair in fields.items() for part in pair)]
                    for entry, fields in client.xrange(key)]  # fmt: skip
        case _:
            raise ValueError(f"{key!r} is a {kind}")


def main() -> None:
    url, path = sys.argv[1:]
    client: Any = redis.Redis(port=int(url.rpartition(":")[2].partition("/")[0]))
    client.flushall()
    it = Recorder(client)
    record(it, url)
    now = client.time()
    about = {"recorded_ms": now[0] * 1000 + now[1] // 1000, "jobs": it.jobs, "keys": dumped(client)}
    Path(path).write_bytes(msgpack.packb(about))


if __name__ == "__main__":
    main()
