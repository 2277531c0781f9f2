"""All routes of the page, with their common parts."""

from collections.abc import Iterator
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from sluice.gateway.audit import AuditLog
from sluice.gateway.files.storage import Storage
from sluice.gateway.keyring import Keyring
from sluice.gateway.native.records import Records
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates
from sluice.gateway.schedules import ScheduleChanges
from sluice.gateway.tables.database import Database
from sluice.gateway.ui.frame import HEADERS, Frame
from sluice.gateway.ui.live import Live
from sluice.gateway.ui.pages.ask import AskPage
from sluice.gateway.ui.pages.batches import BatchPages
from sluice.gateway.ui.pages.dead import DeadPage
from sluice.gateway.ui.pages.job import JobPage
from sluice.gateway.ui.pages.jobs import JobsPage
from sluice.gateway.ui.pages.overview import OverviewPage
from sluice.gateway.ui.pages.schedules import SchedulesPage
from sluice.gateway.ui.pages.signin import HOME, SignIn
from sluice.gateway.ui.pages.tenants import TenantsPage
from sluice.gateway.ui.read.jobs import JobReader
from sluice.gateway.ui.read.surveys import Surveys
from sluice.gateway.ui.sessions import Sessions
from sluice.gateway.ui.templates import STATIC
from sluice.gateway.ui.visitors import Visitors


class Assets(StaticFiles):
    """Scripts, styles and icons. Their URLs change with their content."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, which browsers may cache."""
        response = await super().get_response(path, scope)
        response.headers.update({**HEADERS, "cache-control": "public, max-age=31536000, immutable"})
        return response


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The parts that the page shares with the other routes of its gateway."""

    keyring: Keyring
    queues: Queues
    rates: KeyRates
    records: Records
    database: Database
    """The database with sign-ins, the audit log and the history."""

    storage: Storage
    schedules: ScheduleChanges


def page_routes(parts: SharedParts) -> Iterator[BaseRoute]:
    """Yield the routes."""
    keyring, queues, database = parts.keyring, parts.queues, parts.database
    sessions, audit = Sessions(database), AuditLog(database)
    visitors = Visitors(keyring, sessions)
    surveys = Surveys(queues)
    reader = JobReader(queues, surveys, parts.records)
    frame = Frame(visitors)
    live = Live(frame)
    yield Mount("/ui/static", Assets(directory=STATIC))
    yield frame.open("/", _home)
    yield frame.open("/ui", _home)
    yield from SignIn(frame, visitors, keyring, sessions, audit).routes()
    yield from OverviewPage(frame, live, queues, surveys, database).routes()
    yield from JobsPage(frame, queues, database).routes()
    yield from JobPage(frame, live, reader, queues, audit).routes()
    yield from DeadPage(frame, queues, audit).routes()
    yield from BatchPages(frame, live, queues, database, parts.storage).routes()
    yield from SchedulesPage(frame, queues, parts.schedules).routes()
    yield from TenantsPage(frame, queues, surveys, database, keyring, audit).routes()
    yield from AskPage(frame, queues, parts.rates, database, audit).routes()
    yield frame.open("/ui/{rest:path}", _unknown)


async def _home(_request: Request) -> Response:
    return RedirectResponse(HOME, 303)


async def _unknown(_request: Request) -> Response:
    raise HTTPException(404, "there is no such page")
