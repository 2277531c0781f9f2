"""Find the submission of events that do not name it: workers of an older release wrote them."""

from collections.abc import Sequence

from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.wire import JobId, OutboxEvent
from sluice.worker.connection.clients import Client
from sluice.worker.history.rows import MAX_DIGITS, submit_time
from sluice.worker.history.writer import HistoryWriter


class Submissions:
    """The queue and the history, which know when a job was submitted."""

    def __init__(self, client: Client, writer: HistoryWriter) -> None:
        self._client = client
        self._writer = writer

    def newest(self, keys: QueueKeys, events: Sequence[OutboxEvent]) -> dict[JobId, int]:
        """Return the submit time of each job that has an event without one.

        It is that in the job's hash. If the hash has expired, it is the newest in these events or in the history.

        Raises:
            redis.RedisError: Redis does not answer.
            HistoryAway: the database does not answer.
        """
        unnamed = list(dict.fromkeys(event.job_id for event in events if submit_time(event) is None))
        if not unnamed:
            return {}
        found = self._writer.newest_submissions(keys.queue, unnamed)
        for event in events:
            submitted_ms = submit_time(event)
            if submitted_ms is not None:
                found[event.job_id] = max(submitted_ms, found.get(event.job_id, 0))
        return found | self._in_hashes(keys, unnamed)

    def _in_hashes(self, keys: QueueKeys, job_ids: Sequence[JobId]) -> dict[JobId, int]:
        pipeline = self._client.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.execute_command("HGET", keys.job(job_id), "submitted")
        answers: list[object] = pipeline.execute(raise_on_error=False)
        return {
            job_id: int(answer)
            for job_id, answer in zip(job_ids, answers, strict=True)
            # Another user may have written it.
            if isinstance(answer, bytes) and answer.isdigit() and len(answer) < MAX_DIGITS
        }
