"""Try it: send a prompt to a model, watch the output, leave, and return."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sluice.gateway.audit import AuditLog
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.tables.database import Database
from sluice.gateway.threads import HISTORY
from sluice.gateway.ui.frame import Form, Frame, readable, render
from sluice.gateway.ui.read.joblist import JobLine, JobListQuery, page_of_jobs
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.errors import HistoryUnavailable, ProducerError
from sluice.protocol.jobs import Options
from sluice.protocol.limits import MAX_TOKENS
from sluice.protocol.openai_format.requests import RequestRefused
from sluice.protocol.wire import JobId

PATH = "/ui/try"
BATCH = "page"
"""The batch of all jobs from the page, by which they are found again."""

LISTED = 8
MAX_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The values of the form, which is shown again if it is refused."""

    prompt: str = ""
    model: str = ""
    max_tokens: str = "256"
    temperature: str = "0.7"

    @classmethod
    def of(cls, form: Form) -> "Question":
        """Read a form; missing fields are empty."""
        return cls(**{name: form.get(name, [""])[0] for name in cls.__slots__})

    def options(self) -> Options:
        """Return the options of the job.

        Raises:
            HttpError: 400, a field is missing or out of its range.
        """
        if not self.prompt.strip():
            raise bad_request("write a question first")
        options: Options = {
            "max_tokens": int(_number("most tokens", self.max_tokens, 1, MAX_TOKENS)),
            "temperature": _number("temperature", self.temperature, 0, MAX_TEMPERATURE),
            "as_chat": True,
            "batch": BATCH,
        }
        return {**options, "model": self.model} if self.model else options


class AskPage:
    """The form. Its job continues when the visitor leaves; the job's page shows the whole output at any time."""

    def __init__(self, frame: Frame, queues: Queues, rates: KeyRates, database: Database, audit: AuditLog) -> None:
        self._frame, self._queues, self._rates = frame, queues, rates
        self._database, self._audit = database, audit

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show, scope="submit")
        yield self._frame.action(PATH, self._ask, scope="submit")

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        return await self._page(request, visitor, await self._queues.models(), Question())

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        models: Sequence[str],
        question: Question,
        refused: HttpError | None = None,
    ) -> Response:
        status = 200 if refused is None else refused.status
        values = {"models": models, "question": question, "refused": refused, "before": await self._before(visitor)}
        return render(request, "ask.html", status=status, **values)

    async def _before(self, visitor: Visitor) -> list[JobLine]:
        queues = [queue.name for queue in self._queues]
        query = JobListQuery(queues=queues, tenant=visitor.caller.tenant, batch=BATCH)
        try:
            return (await HISTORY.run(page_of_jobs, self._database, query))[0][:LISTED]
        except HistoryUnavailable:
            return []

    async def _ask(self, request: Request, visitor: Visitor, form: Form) -> Response:
        question = Question.of(form)
        try:
            job_id = await self._submit(visitor, question)
        except (HttpError, RequestRefused, ProducerError) as error:
            return await self._page(request, visitor, await self._models(question), question, readable(error))
        request.state.job_id = job_id
        return RedirectResponse(f"/ui/jobs/{job_id}", 303)

    async def _submit(self, visitor: Visitor, question: Question) -> JobId:
        options, model = question.options(), question.model or None
        queue = await self._queues.of_model(model)
        async with self._audit.action(visitor.caller, "submit", model or "any model", queue.name) as entry:
            job = callers_job(visitor.caller, question.prompt, options)
            receipt, _ = await self._rates.submit(queue, visitor.caller, job)
            entry.outcome = receipt.id
        return receipt.id

    async def _models(self, question: Question) -> Sequence[str]:
        """Return the models to choose from; only the chosen one if no model is known now."""
        try:
            return await self._queues.models() or (question.model,)
        except ProducerError:
            return (question.model,)


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise bad_request(f"{name} must be a number from {least:g} to {most:,.0f}")
    return value
