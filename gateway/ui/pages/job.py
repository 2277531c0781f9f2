"""One job: timeline, output, options and usage; buttons to cancel and requeue it."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import CALLER, HttpError
from sluice.gateway.ownership import shown_batch, unknown_job
from sluice.gateway.queues import Queues
from sluice.gateway.ui.frame import CONFIRMATIONS, Form, Frame, after, render
from sluice.gateway.ui.live import Live
from sluice.gateway.ui.pages.jobstream import JobStream, job_parts, shown_items
from sluice.gateway.ui.read.calls import as_curl, as_python
from sluice.gateway.ui.read.jobs import JobFacts, JobReader, prompt_text
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.errors import JobNotFound
from sluice.protocol.wire import JobId, Prompt

KINDS = ("sh", "py")
MAX_SHOWN_CHARS = 20_000
"""Most characters shown of a prompt, and of a call: a page with all of a long one would be slow."""

CONFIRMATIONS.update(
    cancelled=("good", "The job is cancelled."),
    asked=("good", "Its worker was asked to stop the job."),
    requeued=("good", "The job waits again. It resumes after its last token."),
    ended=("bad", "The job had ended before."),
)


class JobPage:
    """The page of one job, and its buttons."""

    def __init__(self, frame: Frame, live: Live, reader: JobReader, queues: Queues, audit: AuditLog) -> None:
        self._frame, self._live, self._reader, self._audit = frame, live, reader, audit
        self._stream = JobStream(live, reader, queues)

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        path = "/ui/jobs/{job_id}"
        yield self._frame.page(path, self._show)
        yield self._frame.page(f"{path}/ask.{{kind}}", self._call)
        yield self._live.route(f"{path}/events", self._stream.events)
        yield self._frame.action(f"{path}/cancel", self._cancel, scope="control")
        yield self._frame.action(f"{path}/requeue", self._requeue, scope="control")

    def _id(self, request: Request, visitor: Visitor) -> JobId:
        return self._reader.id_of(visitor, request.path_params["job_id"])

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        facts = await self._reader.find(self._id(request, visitor))
        choices = await self._reader.choices(facts) if facts.is_over else ()
        prompt = await self._reader.prompt(facts)
        return render(
            request,
            "job.html",
            facts=facts,
            choices=[(choice.text, shown_items(choice)) for choice in choices],
            prompt=None if prompt is None else prompt_text(prompt),
            calls={kind: _call_in(kind, request, visitor, facts, prompt) for kind in KINDS},
            max_chars=MAX_SHOWN_CHARS,
            parts=job_parts(facts, visitor),
        )

    async def _call(self, request: Request, visitor: Visitor) -> Response:
        """Return a whole call as a file."""
        kind, facts = request.path_params["kind"], await self._reader.find(self._id(request, visitor))
        if kind not in KINDS:
            raise unknown_job()
        text = _call_in(kind, request, visitor, facts, await self._reader.prompt(facts))
        headers = {"content-disposition": f'attachment; filename="ask.{kind}"'}
        return Response(text.encode(errors="replace"), headers=headers, media_type="text/plain; charset=utf-8")

    # ------------------------------------------------------------ changes

    async def _cancel(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        job_id = self._id(request, visitor)
        queue = await self._reader.queue_of(job_id)
        async with self._audit.action(visitor.caller, "cancel", job_id, queue.name) as entry:
            try:
                entry.outcome = await queue.submitting.cancel(job_id)
            except JobNotFound as error:
                raise unknown_job() from error
        change = entry.outcome if entry.outcome in ("cancelled", "asked") else "ended"
        return after(f"/ui/jobs/{job_id}", change)

    async def _requeue(self, request: Request, visitor: Visitor, _form: Form) -> Response:
        job_id = self._id(request, visitor)
        queue = await self._reader.queue_of(job_id)
        async with self._audit.action(visitor.caller, "requeue", job_id, queue.name):
            [is_requeued] = await queue.submitting.requeue([job_id])
            if not is_requeued:
                raise HttpError(
                    409, CALLER, "only a failed job can be requeued, while the queue has its prompt", "state"
                )
        return after(f"/ui/jobs/{job_id}", "requeued")


def _call_in(kind: str, request: Request, visitor: Visitor, facts: JobFacts, prompt: Prompt | None) -> str:
    """Return a call that submits the job again."""
    if kind == "py":
        return as_python(facts.queue, prompt, facts.options)
    base_url, options = str(request.base_url).rstrip("/"), facts.options
    shown = {**options, "batch": shown_batch(visitor.caller, options.get("batch"))}
    return as_curl(base_url, facts.queue, prompt, shown, has_keys=visitor.token is not None)
