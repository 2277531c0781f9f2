"""Fire a queue's schedules, as every worker does once a second: a run is submitted once, whoever is first."""

import threading

from redis.exceptions import RedisError

from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.execution import run_commands
from sluice.protocol.schedules.firing import FIRE_EVERY_S, Look, Problem, ScheduleWatch
from sluice.worker.connection.availability import is_away
from sluice.worker.connection.clients import Client
from sluice.worker.serve.context import WorkerContext


class Schedules:
    """The thread that fires the schedules of one queue. A component: start, stop."""

    def __init__(self, client: Client, context: WorkerContext, queue: str) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            client: A connection for this thread alone.
            context: The worker's shared state.
            queue: The name of the queue.
        """
        self._client = client
        self._health = context.health
        self._who = f"schedules of {queue}"
        self._log = context.log.bind(queue=queue)
        self._watch = ScheduleWatch(QueueKeys(queue))
        self._closing = threading.Event()
        self._thread = context.mailbox.thread("schedules", self._run)
        self._backoff = Backoff()
        self._problems = frozenset[tuple[str, str]]()

    def start(self) -> None:
        """Begin to fire."""
        self._thread.start()

    def stop(self) -> None:
        """Fire no more."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        wait_s = FIRE_EVERY_S
        while not self._closing.wait(wait_s):
            wait_s = self._try_to_fire()

    def _try_to_fire(self) -> float:
        """Fire what is due; return the seconds until the next try."""
        look = Look()
        try:
            self._fire(look)
        except (RedisError, OSError) as error:
            if is_away(error):
                self._health.failed(self._who, error)
                return self._backoff.next_delay_s()
            # Such as a key of another type. Jobs do not depend on it.
            look.problems.append(Problem("*", str(error)))
        finally:
            self._report(look)
        self._health.answered(self._who)
        self._backoff.reset()
        return FIRE_EVERY_S

    def _fire(self, look: Look) -> None:
        steps = self._watch.fire(look)
        commands = next(steps, None)
        while commands is not None:
            replies = run_commands(self._client, commands)
            try:
                commands = steps.send(replies)
            except StopIteration:
                return

    def _report(self, look: Look) -> None:
        """Log the runs, and problems that the last look did not have."""
        for fired in look.fired:
            self._log.info("schedule fired", schedule=fired.schedule.id, run_s=fired.time_s, jobs=len(fired.job_ids))
        problems = frozenset((problem.schedule_id, problem.message) for problem in look.problems)
        for schedule, message in sorted(problems - self._problems):
            self._log.warning("schedule not run", schedule=schedule, error=message)
        self._problems = problems
