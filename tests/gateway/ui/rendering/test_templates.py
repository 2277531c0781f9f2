"""Every template with content, without a gateway: each can be rendered, and nothing that others wrote acts."""

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import pytest

from sluice.gateway.access import Caller
from sluice.gateway.api_keys.key import SCOPES, ApiKey
from sluice.gateway.errors import bad_request
from sluice.gateway.ui.frame import NAVIGATION
from sluice.gateway.ui.pages.ask import Question
from sluice.gateway.ui.pages.dead import Chosen
from sluice.gateway.ui.pages.jobstream import job_parts, shown_items
from sluice.gateway.ui.pages.overview import OwnFigures
from sluice.gateway.ui.pages.schedules import NewSchedule
from sluice.gateway.ui.pages.tenants import TenantLine
from sluice.gateway.ui.read.batches import BatchLine, ErrorGroup
from sluice.gateway.ui.read.deadset import groups_of
from sluice.gateway.ui.read.joblist import JobLine, JobListQuery
from sluice.gateway.ui.read.jobs import JobFacts
from sluice.gateway.ui.read.overview import Latency, Memory, Trends, overview
from sluice.gateway.ui.read.usage import Price, TenantUsage
from sluice.gateway.ui.templates import HERE, fragment
from sluice.gateway.ui.visitors import Visitor
from sluice.history.queries import AttemptRow, JobRow
from sluice.producer.operations.schedules import ScheduleView
from sluice.producer.operations.views import JobStatus
from sluice.protocol.calls import JobView
from sluice.protocol.states import JobState
from sluice.protocol.wire import ChoiceResult, JobId
from tests.gateway.ui.test_job_pages import ACTING, HOSTILE
from tests.gateway.ui.test_overview import view

Made = TypeVar("Made")
NOW_MS = round(time.time() * 1000)
JOB = JobId("0.acme.0123456789abcdef0123456789abcdef")
EVERYBODY = Visitor(caller=Caller(), csrf="c")
SIGNED_IN = Visitor(
    caller=Caller(ApiKey(id="k", digest="d", tenant="acme", scopes=SCOPES, created_ms=0)), csrf="c", token="t"
)
WRITTEN = Question(prompt="<script>alert(1)</script></textarea>", model=HOSTILE, max_tokens=HOSTILE)
"""A form that is shown again; its prompt stays as it is."""

LATENCY = Latency(p50_s=0.2, p95_s=75.0)
WHEN = datetime(2026, 11, 30, 9, tzinfo=UTC)


def filled(kind: type[Made], **given: object) -> Made:
    """Fill a dataclass: what is not given is hostile where it is text, and otherwise a plain value of its type."""
    hints = get_type_hints(kind)
    own = {one.name: value_of(hints[one.name]) for one in fields(kind) if one.name not in given}  # pyright: ignore[reportArgumentType] (a dataclass)
    return kind(**own, **given)


def value_of(hint: Any) -> object:  # Any: an annotation
    """A value of a type; of several, one of the first that is not None."""
    kinds = [one for one in get_args(hint) or (hint,) if one is not NoneType]
    kind = hint if get_origin(hint) in (tuple, Mapping) else kinds[0]
    plain: Mapping[Any, object] = {str: HOSTILE, int: 3, float: 1.5, bool: True}
    return plain.get(kind, {HOSTILE: HOSTILE} if get_origin(kind) is not tuple else ())


def jobs() -> list[JobFacts]:
    """Jobs in each state that their page shows differently."""
    common = {"id": JOB, "submitted_ms": NOW_MS - 9000, "spec": None, "batch": HOSTILE, "deaths": (), "published": (2,)}
    ended = {"started_ms": NOW_MS - 8000, "ended_ms": NOW_MS}
    row = filled(JobRow, id=JOB, submitted_ms=NOW_MS - 9000, finished_ms=NOW_MS)
    lost = {"started_ms": NOW_MS - 8000, "ended_ms": NOW_MS - 5000, "outcome": "returned", "seen_ms": NOW_MS - 6000}
    attempts = [
        filled(AttemptRow, attempt=1, preemption_times=((100, 200),), **lost),
        filled(AttemptRow, attempt=2, started_ms=NOW_MS - 4000, seen_ms=None, preemption_times=None, ended_ms=NOW_MS),
    ]
    states: tuple[dict[str, object], ...] = (
        {"state": JobState.QUEUED, "started_ms": None, "ended_ms": None},
        {"state": JobState.RUNNING, "started_ms": NOW_MS - 8000, "ended_ms": None},
        {"state": JobState.FAILED, **ended},
        {"state": JobState.DONE, **ended},
    )
    living = [
        JobFacts(id=JOB, queue="q", now=filled(JobStatus, **common, **state), record=record)
        for state in states
        for record in (None, (row, attempts))
    ]
    return [*living, JobFacts(id=JOB, queue="q", now=None, record=(row, attempts))]


def job_pages() -> list[dict[str, object]]:
    """Pages of them."""
    call = json.dumps({"name": HOSTILE, "arguments": {"x": HOSTILE}})
    marked = f"<think>{HOSTILE}</think>{HOSTILE}<tool_call>{call}</tool_call>"
    choices = [ChoiceResult(text=marked, token_ids=(), finish_reason=None, format=one) for one in ("", "think+hermes")]
    outputs = [(choice.text, shown_items(choice)) for choice in choices]
    common = {"calls": {"sh": HOSTILE, "py": HOSTILE}, "max_chars": 20}
    return [
        {"facts": facts, "choices": shown, "prompt": prompt, "parts": job_parts(facts, visitor), **common}
        for facts in jobs()
        for shown, prompt, visitor in (((), None, EVERYBODY), (outputs, HOSTILE, SIGNED_IN))
    ]


def overviews() -> list[dict[str, object]]:
    """An overview without workers, and one with everything that can be wrong."""
    worker = {"host": HOSTILE, "name": HOSTILE, "model": HOSTILE, "version": HOSTILE, "device": HOSTILE}
    busy = view(
        waiting_jobs=3,
        is_paused=True,
        suspects=1,
        workers={
            "w": {**worker, "state": "quiet", "recent": "1,0,0,9,5" * 2},
            "v": {**worker, "offer": f"engine={HOSTILE}; exactness={HOSTILE}; refused={HOSTILE}"},
        },
    )
    memory = Memory(used_bytes=99, max_bytes=100)
    empty = overview({"chat": [view(waiting_jobs=2)]}, {}, None, Trends())
    return [{"found": one} for one in (empty, overview({"chat": [busy]}, {"chat": LATENCY}, memory, Trends()))]


def batches() -> list[BatchLine]:
    """One that runs, and one of the gateway that is over."""
    common = {"queue": "q", "id": HOSTILE, "created_ms": NOW_MS - 5000}
    running = filled(BatchLine, **common, counts={"done": 3, "queued": 2, "failed": 1}, status=None, output_file=None)
    over = filled(BatchLine, **common, counts={"done": 5}, total=5, status="in_progress")
    return [running, over]


def dead() -> list[JobView]:
    """Dead jobs."""
    return [filled(JobView, id=JOB, ended_ms=NOW_MS, deaths=(), published=()) for _ in range(2)]


def group(code: str | None = None) -> Chosen:
    """Dead jobs that were chosen."""
    return Chosen(action="delete", queue="q", ticked=frozenset({JOB}), code=code, until_ms=NOW_MS)


def tenant() -> TenantLine:
    """A tenant."""
    usage = filled(TenantUsage, costs=(("EUR", 2.0), ("USD", 0.01)), unpriced=((HOSTILE, 9),))
    return filled(TenantLine, weight=1.0, usage=usage, ttft=LATENCY)


JOBS = {
    "queues": ["q", "r"],
    "states": ["done"],
    "spans": ["day"],
    "priorities": range(2),
    "older": "/o",
    "newest": "/n",
}
NOTHING = JOBS | {"jobs": [], "older": None, "newest": None, "is_filtered": False}
ADDING = {
    "new": filled(NewSchedule, jobs=WRITTEN.prompt),
    "refused": None,
    "following": None,
    "next_runs": (),
    "queues": [HOSTILE],
    "misfires": ["skip"],
    "overlaps": ["skip"],
    "kinds": ["prompt"],
}
NO_PARTS = {"alerts": "", "queues": "", "workers": "", "series": "[]", "own": "", "batch": ""}
CASES: Mapping[str, list[dict[str, Any]]] = {
    "ask.html": [
        {"models": [], "before": [], "question": Question(), "refused": None},
        {"models": [HOSTILE], "before": [filled(JobLine)], "question": WRITTEN, "refused": bad_request(HOSTILE)},
    ],
    "batch.html": [{"queue": "q", "batch_id": HOSTILE, "parts": NO_PARTS}],
    "batches.html": [{"batches": [], "num_left": 2}, {"batches": batches(), "num_left": 0}],
    "dead.html": [{"groups": []}, {"groups": groups_of("q", dead() * 60)}],
    "dead_confirm.html": [
        {"chosen": group(code), "groups": groups_of("q", dead()), "jobs": dead()} for code in (None, HOSTILE)
    ],
    "no_history.html": [{}],
    "error.html": [{"title": "Not found", "message": HOSTILE}],
    "job.html": job_pages(),
    "jobs.html": [
        {"jobs": [filled(JobLine, id=JOB)], "query": filled(JobListQuery, after=None), "is_filtered": True, **JOBS},
        {"query": JobListQuery(queues=["q"]), **NOTHING},
        {"query": JobListQuery(queues=["q"]), **NOTHING, "is_filtered": True},
    ],
    "overview.html": [{"parts": NO_PARTS}],
    "own_overview.html": [{"parts": NO_PARTS}],
    "schedule_confirm.html": [{"queue": "q", "schedule": filled(ScheduleView, last_run=WHEN, next_runs=())}],
    "schedules.html": [
        {"schedules": [], "is_all": True, **ADDING},
        {"schedules": None, "is_all": True, **ADDING, "refused": bad_request(HOSTILE)},
        {
            "schedules": [
                (HOSTILE, filled(ScheduleView, paused=is_paused, last_run=last_run, next_runs=(WHEN, WHEN)))
                for is_paused, last_run in ((False, None), (True, WHEN))
            ],
            "is_all": True,
            **ADDING,
            "following": "/f",
            "next_runs": [WHEN],
        },
        {
            "schedules": [("default", filled(ScheduleView, paused=False, last_run=WHEN, next_runs=()))],
            "is_all": False,
            **ADDING,
        },
    ],
    "sign_in.html": [{"back": HOSTILE, "is_wrong": is_wrong} for is_wrong in (False, True)],
    "tenants.html": [
        {"tenants": [], "prices": [], "unpriced": (), "is_all": True, "hours_left": 3, "queues": []},
        {
            "tenants": [tenant()],
            "prices": [filled(Price)],
            "unpriced": ((HOSTILE, 9),),
            "is_all": True,
            "hours_left": 0,
            "queues": [HOSTILE, "b"],
        },
        {"tenants": [tenant()], "prices": [], "unpriced": (), "is_all": False, "hours_left": 0, "queues": []},
    ],
    "parts/alerts.html": overviews(),
    "parts/queues.html": overviews(),
    "parts/workers.html": overviews(),
    "parts/no_history.html": [{}],
    "parts/own.html": [{"own": OwnFigures(counts={"done": 3, "failed": 1}, ttft=LATENCY)}],
    "parts/batch.html": [
        {"batch": batch, "errors": errors, "is_stalled": bool(errors)}
        for batch in batches()
        for errors in ([], [filled(ErrorGroup, column="error")])
    ],
}
"""What each template is rendered with."""

WITH_OTHERS = {"base.html", "macros.html", "parts/job_facts.html", "parts/job_state.html", "parts/timeline.html"}
"""Templates that the pages above have in them."""


class TestGivenTheFolderOfTemplates:
    def test_when_it_is_listed_then_each_template_has_a_case(self) -> None:
        names = {str(path.relative_to(HERE / "templates")) for path in (HERE / "templates").rglob("*.html")}

        assert names == {*CASES} | WITH_OTHERS


@pytest.mark.parametrize("name", CASES)
class TestGivenTextOfOthers:
    @pytest.mark.parametrize("visitor", [EVERYBODY, SIGNED_IN], ids=["everybody", "signed in"])
    def test_when_a_template_is_rendered_then_none_of_it_acts(self, name: str, visitor: Visitor) -> None:
        frame = {"visitor": visitor, "links": NAVIGATION, "here": "/ui/jobs", "confirmation": ("good", HOSTILE)}

        pages = [fragment(name, **frame, **values) for values in CASES[name]]

        assert all("<script>alert" not in page for page in pages)
        assert [sorted(ACTING & {*page}) for page in pages] == [[]] * len(pages)
