"""Submit the due jobs of a queue, of schedules and chains, as every worker does once a second: each job once.

The end of a job here releases the chains that wait for it within milliseconds; the look of each second finds others.
"""

import threading
from collections.abc import Generator, Sequence

from redis.exceptions import RedisError

from sluice.protocol.chains.releasing import ChainLook, ChainWatch
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.backoff import Backoff
from sluice.protocol.redis.execution import Command, Reply, run_commands
from sluice.protocol.schedules.firing import FIRE_EVERY_S, Look, Problem, ScheduleWatch
from sluice.worker.clock import monotonic_s
from sluice.worker.connection.availability import is_away
from sluice.worker.connection.clients import Client
from sluice.worker.serve.context import WorkerContext

MERGE_S = 0.02
"""Ends within this time are looked up together."""


class DueJobs:
    """The thread that fires the schedules of one queue and releases its chains. A component: start, stop."""

    def __init__(self, client: Client, context: WorkerContext, queue: str) -> None:
        """Prepare the thread; `start` runs it.

        Args:
            client: A connection for this thread alone.
            context: The worker's shared state.
            queue: The name of the queue.
        """
        self._client = client
        self._health = context.health
        self._who = f"due jobs of {queue}"
        self._log = context.log.bind(queue=queue)
        self._schedules = ScheduleWatch(QueueKeys(queue))
        self._chains = ChainWatch(QueueKeys(queue))
        self._ended = context.ended[queue]
        self._closing = threading.Event()
        self._thread = context.mailbox.thread("due jobs", self._run)
        self._backoff = Backoff()
        self._problems = frozenset[tuple[str, str, str]]()

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._closing.set()
        self._ended.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        due_s = monotonic_s() + FIRE_EVERY_S
        while not self._closing.is_set():
            ended = self._ended.take(due_s - monotonic_s())
            if ended and not self._closing.wait(MERGE_S):
                ended += self._ended.take(0)
            is_due = monotonic_s() >= due_s
            if ended or is_due:
                wait_s = self._try_to_look(ended, is_due=is_due)
                due_s = monotonic_s() + wait_s if is_due else min(due_s, monotonic_s() + wait_s)

    def _try_to_look(self, ended: Sequence[str], *, is_due: bool) -> float:
        """Release the chains that wait for jobs that ended here, and what else is due; return the time until the next.

        Problems of all chains are only known if this is due.
        """
        look, chains = Look(), ChainLook()
        try:
            if ended and (problem := self._run_steps(self._chains.release(chains, ended))):
                chains.problems.append(("*", problem))
            if is_due and (problem := self._run_steps(self._schedules.fire(look))):
                look.problems.append(Problem("*", problem))
            if is_due and (problem := self._run_steps(self._chains.release(chains))):
                chains.problems.append(("*", problem))
        except (RedisError, OSError) as error:
            self._health.failed(self._who, error)
            self._closing.wait(self._backoff.next_delay_s())
            return 0.0
        finally:
            self._report(look, chains, is_due=is_due)
        self._health.answered(self._who)
        self._backoff.reset()
        # More of them may be due than one look reads.
        return 0.0 if chains.released and not chains.full else FIRE_EVERY_S

    def _run_steps(self, steps: Generator[tuple[Command, ...], Sequence[Reply], None]) -> str | None:
        """Run a look; return the error that has ended it, such as a key of another type: the next look tries again."""
        commands = next(steps)
        while True:
            try:
                commands = steps.send(run_commands(self._client, commands))
            except StopIteration:
                return None
            except (RedisError, OSError) as error:
                if is_away(error):
                    raise
                return str(error)

    def _report(self, look: Look, chains: ChainLook, *, is_due: bool) -> None:
        """Log what was submitted, and problems that the last look did not have."""
        for fired in look.fired:
            self._log.info("schedule fired", schedule=fired.schedule.id, run_s=fired.time_s, jobs=len(fired.job_ids))
        for chain, num_jobs, reason in chains.released:
            self._log.info("chain released" if reason is None else "chain cancelled", chain=chain, jobs=num_jobs)
        if not is_due:
            return
        problems = {("schedule not run", problem.schedule_id, problem.message) for problem in look.problems}
        problems |= {("chain not released", chain, message) for chain, message in chains.problems}
        for event, about, message in sorted(problems - self._problems):
            self._log.warning(event, **{event.partition(" ")[0]: about}, error=message)
        self._problems = frozenset(problems)
