"""The facts about one job from its queue and the history, and its prompt while the queue has it."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from time import monotonic
from typing import Any

from sluice.gateway.errors import HttpError
from sluice.gateway.native.records import Records
from sluice.gateway.ownership import own_job_id, unknown_job
from sluice.gateway.queues import QueueClients, Queues
from sluice.gateway.ui.read.surveys import Surveys
from sluice.gateway.ui.visitors import Visitor
from sluice.history.queries import AttemptRow, History, JobRow
from sluice.producer.bulk.recorded import recorded_outcome
from sluice.producer.errors import AccessDenied, JobNotDone, ProducerError
from sluice.producer.operations.chains import waits_for
from sluice.producer.operations.operation import Ask, Operation
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.views import JobStatus, status_of
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.states import JobState
from sluice.protocol.tools import AUTO
from sluice.protocol.wire import ChoiceResult, JobId, JobOptions, Message, Prompt, WireError, decode_prompt, decode_spec

RECORDED_WITHIN_S = 5.0
"""How long the history may lack a change, in seconds."""

Record = tuple[JobRow, Sequence[AttemptRow]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The facts about a job."""

    id: JobId
    queue: str
    now: JobStatus | None
    """The queue's facts; None if it has forgotten the job."""

    record: Record | None
    """The history's facts: its row and attempts."""

    @property
    def tenant(self) -> str:
        """The tenant of the job."""
        return split_job_id(self.id)[1]

    @property
    def state(self) -> str:
        """The state of the job; the queue's is the newer one."""
        if self.now is not None:
            return self.now.state
        return "unknown" if self.record is None else self.record[0].state

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state not in (JobState.BLOCKED, JobState.QUEUED, JobState.RUNNING)

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return 1 if self.now is None else self.now.choices

    @property
    def options(self) -> Mapping[str, Any]:  # Any: options are of several types
        """The options that differ from their defaults."""
        if self.now is not None and self.now.spec is not None:
            return _options_in(self.now.spec, self.now.priority)
        if self.record is not None and self.record[0].options is not None:
            return {name: value for name, value in self.record[0].options.items() if value is not None}
        return {}


class JobReader:
    """The jobs that a visitor may see."""

    def __init__(self, queues: Queues, surveys: Surveys, records: Records) -> None:
        self._queues, self._surveys, self._records = queues, surveys, records

    def id_of(self, visitor: Visitor, text: str) -> JobId:
        """Return the id of the job to look up; for another tenant's job, an id that no job has.

        Raises:
            HttpError: 404, the text is not a job id.
        """
        if visitor.tenant is not None:
            return own_job_id(visitor.caller, text)
        try:
            split_job_id(text)
        except WireError as error:
            raise unknown_job() from error
        return JobId(text)

    async def queue_of(self, job_id: JobId) -> QueueClients:
        """Return the queue that has a job.

        Raises:
            HttpError: 404, no queue has the job.
        """
        for queue in self._queues:
            if (await queue.submitting.views([job_id]))[0] is not None:
                return queue
        raise unknown_job()

    async def find(self, job_id: JobId) -> JobFacts:
        """Return the facts about a job.

        Raises:
            HttpError: 404, the job is unknown.
        """
        for queue in self._queues:
            if (now := await self.status(queue, job_id)) is not None:
                record = await self.record([queue.name], job_id)
                return JobFacts(id=job_id, queue=queue.name, now=now, record=record)
        record = await self.record([queue.name for queue in self._queues], job_id)
        if record is None:
            raise unknown_job()
        return JobFacts(id=job_id, queue=record[0].queue, now=None, record=record)

    async def status(self, queue: QueueClients, job_id: JobId) -> JobStatus | None:
        """Return a queue's facts about a job; None if it does not know the job."""
        [view] = await queue.submitting.views([job_id])
        if view is None:
            return None
        survey = None
        if view.state is JobState.QUEUED:
            with suppress(AccessDenied):
                survey = await self._surveys.of_partition(queue, split_job_id(job_id)[0])
        status = status_of(queue.submitting.target, view, survey)
        if view.state is not JobState.BLOCKED:
            return status
        return replace(status, waits_for=await queue.submitting.run(waits_for(queue.submitting.target, job_id)))

    async def record(self, queues: Sequence[str], job_id: JobId) -> Record | None:
        """Return the history's facts about a job of these queues; None if it has none, or cannot be read."""
        return await self._records.read_if_possible(lambda history: _record(history, queues, job_id))

    async def choices(self, facts: JobFacts) -> Sequence[ChoiceResult]:
        """Return the output of an ended job, if it is still stored."""
        try:
            if facts.now is not None:
                return (await self._queues[facts.queue].submitting.result(facts.id, timeout_s=0)).choices
        except JobNotDone as ended:
            if ended.partial is not None:
                return ended.partial.choices
        except ProducerError:
            pass  # it has expired; the history may have it
        outcome = await self._records.read_if_possible(lambda history: recorded_outcome(history, facts.queue, facts.id))
        return () if outcome is None or outcome.result is None else outcome.result.choices

    async def prompt(self, facts: JobFacts) -> Prompt | None:
        """Return the prompt of a job; None once it has ended, because the queue deletes it then."""
        client = self._queues[facts.queue].submitting
        try:
            return await client.run(_read_prompt(client.target, facts.id))
        except (ProducerError, HttpError, WireError):
            return None


class Watched:
    """A job that a page watches. Changes with each look: the history is read only while it may lack a change."""

    def __init__(
        self, reader: JobReader, queue: QueueClients, facts: JobFacts, lag_s: float = RECORDED_WITHIN_S
    ) -> None:
        self.facts = facts
        self._reader, self._queue, self._lag_s = reader, queue, lag_s
        self._changed_s = monotonic()

    @property
    def is_settled(self) -> bool:
        """Whether no more changes are expected: the job has ended, and the history has its end or is too late."""
        record = self.facts.record
        is_recorded = record is not None and record[0].finished_ms is not None
        return self.facts.is_over and (is_recorded or not self._is_new)

    async def look(self) -> JobFacts:
        """Read the facts that may have changed.

        Raises:
            HttpError: 404, queue and history have forgotten the job.
            QueueUnreachable: the server does not answer.
        """
        before = self.facts
        now = await self._reader.status(self._queue, before.id)
        has_changed = _moment(now) != _moment(before.now)
        if has_changed:
            self._changed_s = monotonic()
        record = await self._reader.record([before.queue], before.id) if has_changed or self._is_new else before.record
        if now is None and record is None:
            raise unknown_job()
        self.facts = JobFacts(id=before.id, queue=before.queue, now=now, record=record)
        return self.facts

    @property
    def _is_new(self) -> bool:
        return monotonic() - self._changed_s < self._lag_s


def _moment(now: JobStatus | None) -> tuple[object, ...]:
    """Return a value that changes with each event of a job that the history records."""
    return () if now is None else (now.version, now.state, now.attempt, now.first_token_ms)


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as readable text."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_message_text(part) if isinstance(part, Message) else str(part) for part in prompt)


def _message_text(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return "\n".join(filter(None, (f"{message.role}: {message.content}", *calls)))


def _read_prompt(queue: Queue, job_id: JobId) -> Operation[Prompt | None]:
    [packed] = yield Ask((("GET", queue.keys_of(job_id).payload(job_id)),))
    return decode_prompt(packed) if isinstance(packed, bytes) else None


def _record(history: History, queues: Sequence[str], job_id: JobId) -> Record | None:
    row = history.job(queues, job_id)
    return None if row is None else (row, history.attempts(row.queue, job_id))


def _options_in(packed: bytes, priority: int) -> Mapping[str, Any]:  # Any: as in `options`
    try:
        spec = decode_spec(packed)
    except WireError:
        return {}
    options = {field.name: getattr(spec.options, field.name) for field in fields(JobOptions)}
    changed = {
        field.name: options[field.name] for field in fields(JobOptions) if options[field.name] != _default_of(field)
    }
    own = {
        "model": spec.model,
        "batch": spec.batch,
        "metadata": dict(spec.metadata),
        "as_chat": spec.as_chat,
        "tools": [{"type": "function", "function": json.loads(tool)} for tool in spec.tools],
        "tool_choice": "" if spec.tool_choice == AUTO else spec.tool_choice,
    }
    unset = {name: False for name in ("add_special_tokens", "parallel_tool_calls") if not getattr(spec, name)}
    return {
        **changed,
        **{name: value for name, value in own.items() if value},
        **unset,
        **({"priority": priority} if priority else {}),
    }


def _default_of(field: Any) -> object:  # noqa: ANN401  # a field of a dataclass
    return field.default if field.default_factory is MISSING else field.default_factory()
