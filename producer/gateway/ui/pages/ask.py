"""Try it: ask a model, watch the answer, leave, and rejoin."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from sluice.producer.contract.jobs import Job, Options
from sluice.producer.contract.limits import MAX_TOKENS
from sluice.producer.errors import HistoryUnavailable
from sluice.producer.gateway.errors import bad_request
from sluice.producer.gateway.queues import Queues
from sluice.producer.gateway.rates import Rates
from sluice.producer.gateway.tables.database import Database
from sluice.producer.gateway.tables.threads import HISTORY
from sluice.producer.gateway.ui.audit import AuditLog
from sluice.producer.gateway.ui.frame import Form, Frame, render
from sluice.producer.gateway.ui.read.joblist import JobLine, Wanted, page_of_jobs
from sluice.producer.gateway.ui.visitors import Visitor

PATH = "/ui/try"
BATCH = "page"
"""The batch of questions from the page, by which they are found again."""

LISTED = 8
DEFAULT_TOKENS, MAX_TEMPERATURE = 256, 2.0


class AskPage:
    """The form. Its job goes on when the visitor leaves, and its page shows all of the answer at any time."""

    def __init__(self, frame: Frame, queues: Queues, rates: Rates, database: Database, audit: AuditLog) -> None:
        self._frame, self._queues, self._rates = frame, queues, rates
        self._database, self._audit = database, audit

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show, scope="submit")
        yield self._frame.action(PATH, self._ask, scope="submit")

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        models = await self._queues.models()
        return render(request, "ask.html", models=models, before=await self._before(visitor), max_tokens=DEFAULT_TOKENS)

    async def _before(self, visitor: Visitor) -> list[JobLine]:
        queues = [queue.name for queue in self._queues]
        wanted = Wanted(queues=queues, tenant=visitor.caller.tenant, batch=BATCH)
        try:
            return (await HISTORY.run(page_of_jobs, self._database, wanted))[0][:LISTED]
        except HistoryUnavailable:
            return []

    async def _ask(self, request: Request, visitor: Visitor, form: Form) -> Response:
        prompt, model = form.get("prompt", [""])[0], form.get("model", [""])[0] or None
        if not prompt.strip():
            raise bad_request("write a question first")
        options: Options = {
            "max_tokens": int(_number(form, "max_tokens", 1, MAX_TOKENS)),
            "temperature": _number(form, "temperature", 0, MAX_TEMPERATURE),
            "as_chat": True,
            "batch": BATCH,
            "tenant": visitor.caller.tenant,
        }
        if model is not None:
            options["model"] = model
        queue = await self._queues.of_model(model)
        async with self._audit.action(visitor.caller, "submit", model or "any model", queue.name) as entry:
            receipt, _ = await self._rates.submit(queue, visitor.caller, Job(prompt, options))
            entry.outcome = receipt.id
        request.state.job_id = receipt.id
        return RedirectResponse(f"/ui/jobs/{receipt.id}", 303)


def _number(form: Form, name: str, least: float, most: float) -> float:
    try:
        value = float(form.get(name, [""])[0])
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise bad_request(f"{name} must be a number from {least:g} to {most:g}", param=name)
    return value
