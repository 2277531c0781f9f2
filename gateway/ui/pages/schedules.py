"""Schedules: their rules, their last runs and the next ones; forms to add, pause, resume and remove them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from typing import cast, get_args
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.native.search import queue_named
from sluice.gateway.queues import Queues
from sluice.gateway.rates import job_of_key
from sluice.gateway.schedules import Change, ScheduleChanges, on_thread, page_of_schedules
from sluice.gateway.ui.frame import CONFIRMATIONS, Form, Frame, after, readable, render
from sluice.gateway.ui.visitors import Visitor
from sluice.producer.bulk.schedule_lines import jobs_of_lines
from sluice.producer.errors import ProducerError, ScheduleNotFound
from sluice.producer.operations.schedules import find, packed_jobs
from sluice.protocol.jobs import CheckedJob, Job, Options
from sluice.protocol.schedules.schedule import Misfire, Overlap, Schedule

PATH = "/ui/schedules"
NUM_NEXT = 3
PROMPT, LINES = "prompt", "lines of a bulk file"

CONFIRMATIONS.update(
    schedule_add=("good", "The schedule is added. Its next runs are in the list."),
    schedule_pause=("good", "The schedule is paused. The times of the pause do not run, also not later."),
    schedule_resume=("good", "The schedule runs again."),
    schedule_remove=("good", "The schedule is removed. Jobs that it has submitted continue."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSchedule:
    """The values of the form, which is shown again with the next runs, or if it is refused."""

    name: str = ""
    tenant: str = "default"
    """Of a visitor who may choose it."""

    queue: str = ""
    cron: str = ""
    zone: str = "UTC"
    misfire: str = "latest"
    overlap: str = "allow"
    kind: str = PROMPT
    """What `jobs` is: `PROMPT`, of the only job of a run, or `LINES`."""

    jobs: str = ""

    @classmethod
    def of(cls, form: Form) -> "NewSchedule":
        """Read a form; missing fields are empty."""
        return cls(**{name: form.get(name, [""])[0] for name in cls.__slots__})

    def checked(self, visitor: Visitor) -> tuple[Schedule, list[CheckedJob]]:
        """Return the schedule and its jobs.

        Raises:
            InvalidJob: a value is wrong.
        """
        tenant = self.tenant if visitor.tenant is None else visitor.tenant
        schedule = Schedule(
            name=self.name,
            tenant=tenant,
            cron=self.cron,
            zone=self.zone,
            misfire=cast("Misfire", self.misfire),
            overlap=cast("Overlap", self.overlap),
        )
        own: Options = {"tenant": tenant}
        is_prompt = self.kind == PROMPT
        given = [Job(self.jobs, own)] if is_prompt else jobs_of_lines(BytesIO(self.jobs.encode()), own)
        jobs = [job_of_key(visitor.caller.key, job.prompt, job.options) for job in given]
        packed_jobs(schedule, jobs)
        return schedule, jobs


class SchedulesPage:
    """The page and its forms. Without `admin`, a visitor sees its own tenant's; with a key, it changes no others."""

    def __init__(self, frame: Frame, queues: Queues, changes: ScheduleChanges) -> None:
        self._frame, self._queues, self._changes = frame, queues, changes

    def routes(self) -> Iterator[Route]:
        """Yield the routes."""
        yield self._frame.page(PATH, self._show)
        yield self._frame.action(PATH, self._add, scope="submit")
        yield self._frame.action(f"{PATH}/change", self._change, scope="control")

    async def _show(self, request: Request, visitor: Visitor) -> Response:
        return await self._page(request, visitor, NewSchedule())

    async def _page(
        self,
        request: Request,
        visitor: Visitor,
        new: NewSchedule,
        refused: HttpError | None = None,
        next_runs: Sequence[datetime] = (),
    ) -> Response:
        own = None if visitor.may("admin") else visitor.caller.tenant
        schedules, following = None, None
        try:
            schedules, following = await page_of_schedules(
                self._queues, own, num_next=NUM_NEXT, after=request.query_params.get("after", "")
            )
        except ProducerError:
            if refused is None:
                raise
        return render(
            request,
            "schedules.html",
            status=200 if refused is None else refused.status,
            schedules=schedules,
            following=following and f"{PATH}?{urlencode({'after': following})}",
            is_all=own is None,
            new=new,
            refused=refused,
            next_runs=next_runs,
            queues=[queue.name for queue in self._queues],
            misfires=get_args(Misfire),
            overlaps=get_args(Overlap),
            kinds=(PROMPT, LINES),
        )

    # ------------------------------------------------------------ changes

    async def _add(self, request: Request, visitor: Visitor, form: Form) -> Response:
        share_of(request).charge(0)  # a preview and a replaced schedule add to no other count
        new = NewSchedule.of(form)
        try:
            schedule, jobs = await on_thread(new.checked, visitor)
            if "preview" in form:
                next_runs = await on_thread(schedule.next_runs, datetime.now(UTC), NUM_NEXT)
                return await self._page(request, visitor, new, next_runs=next_runs)
            await self._changes.add(visitor.caller, queue_named(self._queues, new.queue), schedule, jobs)
        except (HttpError, ProducerError) as error:
            return await self._page(request, visitor, new, readable(error))
        return after(PATH, "schedule_add")

    async def _change(self, request: Request, visitor: Visitor, form: Form) -> Response:
        values = {name: texts[0] for name, texts in form.items()}
        change, tenant, name = (values.get(field, "") for field in ("do", "tenant", "name"))
        if change not in get_args(Change):
            raise bad_request("choose pause, resume or remove")
        if visitor.tenant not in (None, tenant):
            raise ScheduleNotFound(name, tenant)
        queue = queue_named(self._queues, values.get("queue", ""))
        kept = await queue.submitting.run(find(queue.submitting.target, name, tenant))
        if change == "remove" and "confirmed" not in form:
            view = await on_thread(kept.view)
            return render(request, "schedule_confirm.html", queue=queue.name, schedule=view)
        await self._changes.change(visitor.caller, queue, kept, cast("Change", change))
        return after(PATH, f"schedule_{change}")
