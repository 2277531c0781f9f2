"""A queue with jobs in every state, and copies of the scripts in which one command fails."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis

from sluice.protocol import calls
from sluice.protocol.calls import Call, QueueSettings, audit
from sluice.protocol.calls.control import KnownSettings, restore_settings
from sluice.protocol.scripts import load
from sluice.protocol.states import JobState
from sluice.protocol.wire import JobId, encode_prompt
from tests.protocol.driving import Queue, Worker, ending, new_job, tokens

COMMANDS = "local call, try = redis.call, redis.pcall"
FAILING = """local call, try = (function()
  local number = 0
  local function is_failing()
    number = number + 1
    redis.call('SET', 'commands', number)
    return number == FAILING_COMMAND
  end
  return function(...)
    if is_failing() then error('this command fails') end
    return redis.call(...)
  end, function(...)
    if is_failing() then return { err = 'ERR this command fails' } end
    return redis.pcall(...)
  end
end)()"""


def failing(script: str, number: int) -> str:
    """The source of a script whose command of this number fails; 0: none does."""
    source = load(script).source
    assert source.count(COMMANDS) == 1
    return source.replace(COMMANDS, FAILING.replace("FAILING_COMMAND", str(number)))


def run_failing(queue: Queue, call: Call[Any], number: int) -> int:  # Any: the reply is not looked at
    """Run a call whose command of this number fails; return how many commands it ran."""
    with suppress(CommandFailed):
        _run(queue, call, number)
    return int(queue.client.getdel("commands"))


class CommandFailed(Exception):
    """The script ended at the command that fails."""


def _run(queue: Queue, call: Call[Any], number: int) -> None:
    try:
        queue.client.execute_command("EVAL", failing(call.script, number), len(call.keys), *call.keys, *call.args)
    except redis.ResponseError as error:
        if "this command fails" not in str(error):
            raise
        raise CommandFailed from error


@dataclass(slots=True, eq=False)
class World:
    """A queue with jobs in every state. Changes: calls are made on it."""

    queue: Queue
    worker: Worker
    """Holds `streaming`, `ending`, `breaking` and `flagged`."""

    leased: dict[str, Any]  # Any: leased jobs by name


def world_on(queue: Queue) -> World:
    """Fill an empty queue."""
    queue.stop_clock()
    queue.configure(keep_prompts="full")
    dying, worker = queue.worker("D"), queue.worker("W")
    for name in ("orphan", "stopped"):
        queue.add(name)
    dying.pull()
    dying.beat(JobId("0.t.orphan"), JobId("0.t.stopped"))
    queue.cancel(JobId("0.t.stopped"))
    queue.pass_time(10_000)
    for name in ("streaming", "breaking", "flagged", "done", "failed"):
        queue.add(name, batch="b", idempotency_key=name)
    queue.add("ending", batch="b", wants_callback=True, deadline_ms=queue.now_ms + 60_000, ttl_ms=50_000)
    worker.beat()
    worker.number += 1
    leased = {job.id.split(".")[2]: job for job in worker.pull(may_declare_dead=False).jobs}
    worker.advance(tokens(leased["streaming"], 0, 3), ending(leased["done"], 0, 2))
    worker.advance(ending(leased["failed"], 0, 1, state=JobState.FAILED))
    queue.cancel(JobId("0.t.flagged"))
    queue.add("waiting", batch="b")
    queue.add("other", tenant="u", priority=3)
    queue.add("later", not_before_ms=queue.now_ms + 60_000)
    queue.add("due", not_before_ms=queue.now_ms + 500)
    queue.add("late", ttl_ms=500)
    queue.pass_time(1000)
    worker.beat(*(JobId(f"0.t.{name}") for name in ("streaming", "ending", "breaking", "flagged")))
    return World(queue, worker, leased)


def _submit(world: World) -> Call[Any]:
    jobs = [new_job("new", batch="b", idempotency_key="n", ttl_ms=90_000), new_job("newer", tenant="u")]
    return calls.submit(world.queue.keys, [*jobs, new_job("newest", not_before_ms=world.queue.now_ms + 1000)])


def _pull(world: World) -> Call[Any]:
    request = calls.PullRequest(
        incarnation="N",
        number=1,
        kv_tokens=10**6,
        prefill_tokens=10**6,
        sequences=99,
        cache_tokens=10**6,
        is_empty=True,
    )
    return calls.pull(world.queue.keys, request)


def _advance(world: World) -> Call[Any]:
    progress = [
        tokens(world.leased["streaming"], 3, 2, first_scheduled_ms=1, first_token_ms=2, prompt_tokens=9),
        ending(world.leased["ending"], 0, 4),
        ending(world.leased["breaking"], 0, 0, state=JobState.FAILED, retry_in_ms=1000),
        ending(world.leased["flagged"], 0, 0, state=JobState.CANCELLED),
    ]
    return calls.advance(world.queue.keys, "W", progress)


def _give_back(world: World) -> Call[Any]:
    returned = [calls.Returned(job_id=job.id, epoch=job.epoch) for job in world.leased.values()]
    return calls.give_back(world.queue.keys, "W", returned, deregister=True)


def _repair_lane(world: World) -> Call[Any]:
    entry = world.queue.client.xadd(world.queue.keys.lane(0, "t"), {"x": "1"}).decode()
    return audit.repair_lane(world.queue.keys, "0:t", [entry])


def _repair_batches(world: World) -> Call[Any]:
    world.queue.client.hset(world.queue.keys.key("batch", "b"), "total", "9")
    return audit.repair_batches(world.queue.keys, ["b"])


def _restore_prompt(world: World) -> Call[Any]:
    waiting = JobId("0.t.waiting")
    world.queue.client.delete(world.queue.keys.payload(waiting))
    return audit.restore_prompt(world.queue.keys, [(waiting, encode_prompt("waiting"))])


def _maintain(world: World) -> Call[Any]:
    world.queue.pass_time(70_000)
    return calls.maintain(world.queue.keys, incarnation="M", may_declare_dead=True)


CALLS: dict[str, Callable[[World], Call[Any]]] = {
    "submit": _submit,
    "pull": _pull,
    "advance": _advance,
    "give_back": _give_back,
    "beat": lambda world: calls.beat(
        world.queue.keys,
        calls.Beat(incarnation="W", held=(JobId("0.t.streaming"),), processed_pull=9, expiry_ms=4000),
    ),
    "cancel": lambda world: calls.cancel(world.queue.keys, [JobId("0.t.waiting"), JobId("0.t.streaming")]),
    "cancel_batch": lambda world: calls.cancel_batch(world.queue.keys, "b"),
    "close_batch": lambda world: calls.close_batch(world.queue.keys, "b", callback_url="http://x"),
    "expire_batch": lambda world: calls.expire_batch(world.queue.keys, "b", deadline_ms=world.queue.now_ms + 9000),
    "configure": lambda world: calls.configure(world.queue.keys, QueueSettings(mode="deadline", max_failures=2)),
    "restore_settings": lambda world: restore_settings(world.queue.keys, KnownSettings()),
    "delete": lambda world: calls.delete(world.queue.keys, [JobId("0.t.done"), JobId("0.t.failed")]),
    "purge": lambda world: calls.purge(world.queue.keys),
    "put_result": lambda world: calls.put_result(
        world.queue.keys, "W", JobId("0.t.ending"), world.leased["ending"].epoch, offset=0, part=b"part"
    ),
    "requeue": lambda world: calls.requeue(world.queue.keys, [JobId("0.t.failed")]),
    "report_death": lambda world: calls.report_death(world.queue.keys, "W"),
    "maintain": _maintain,
    "repair_jobs": lambda world: audit.repair_jobs(
        world.queue.keys, [JobId("0.t.streaming"), JobId("0.t.waiting")], {}
    ),
    "repair_counters": lambda world: audit.repair_counters(world.queue.keys, ["0:t"], audit.Sums()),
    "repair_lane": _repair_lane,
    "repair_batches": _repair_batches,
    "restore_prompt": _restore_prompt,
    "republish_events": lambda world: audit.republish_events(world.queue.keys, [(JobId("0.t.done"), 0)]),
}
"""A call of each script that writes."""
