"""Conversion of a client's arguments: jobs, options, durability and server."""

from collections.abc import Iterable
from typing import TypeVar

from sluice.producer import config
from sluice.producer.errors import InvalidJob
from sluice.producer.operations.durability import TIMEOUT_S, DurabilityPolicy
from sluice.producer.operations.follow import Cursor, Place, Reader
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.submission import Receipt
from sluice.producer.transport.retries import LinkSettings
from sluice.protocol.chains.chain import After, OnFailure, When
from sluice.protocol.durability import read_durability
from sluice.protocol.errors import InvalidPrompt
from sluice.protocol.host.state_folder import state_dir
from sluice.protocol.jobs import CheckedJob, Job, Options, PromptLike, checked_job, encoded_prompt, template
from sluice.protocol.redis import embedded
from sluice.protocol.waits import WaitNotifier
from sluice.protocol.wire import JobId

Jobs = TypeVar("Jobs")
AnyJob = JobId | str | Receipt
"""A job: its id, or the receipt of its submit."""

_NOT_A_LIST = "expected a list of jobs, got one job"


def job_ids(jobs: Iterable[AnyJob]) -> list[JobId]:
    """Return the ids of jobs.

    Raises:
        InvalidJob: the argument is a single job.
    """
    return [JobId(str(job)) for job in listed(jobs)]


def readers_of(queue: Queue, jobs: Iterable[AnyJob | tuple[AnyJob, Place]]) -> list[Reader]:
    """Return a reader of the first choice of each job.

    Raises:
        InvalidJob: a job is given twice, or the argument is a single job.
    """
    if _is_one_with_place(jobs):
        raise InvalidJob(_NOT_A_LIST)
    pairs = [job if isinstance(job, tuple) else (job, 0) for job in listed(jobs)]
    readers = {str(job): Reader(queue, JobId(str(job)), place) for job, place in pairs}
    if len(readers) < len(pairs):
        raise InvalidJob("a job is given twice: give each once, with the lowest of its positions")
    return list(readers.values())


def _is_one_with_place(jobs: object) -> bool:
    match jobs:
        case (str() | Receipt(), int() | Cursor()):
            return True
        case _:
            return False


def after(*jobs: AnyJob, when: When = "all", on_failure: OnFailure = "cancel") -> After:
    """Say what a job waits for: `submit(prompt, after=after(first, second, when="any"))`.

    Args:
        jobs: Jobs of the same queue and tenant, up to 64.
        when: Whether `all` of them must end, or `any` one.
        on_failure: What counts as an end. `cancel`: only a job that is done; the job that waits is cancelled once the
            others cannot suffice. `release`: every end.

    Raises:
        InvalidJob: an id or a choice is wrong.
    """
    return After(tuple(job_ids(jobs)), when, on_failure)


def after_of(jobs: Iterable[AnyJob] | After | None) -> After | None:
    """Return what jobs wait for; None for nothing.

    Raises:
        InvalidJob: an id is wrong, or `jobs` is a single job.
    """
    return jobs if jobs is None or isinstance(jobs, After) else after(*job_ids(jobs))


def scheduled_jobs(jobs: Iterable[PromptLike | Job], options: Options) -> list[CheckedJob]:
    """Return the checked jobs of a schedule.

    Raises:
        InvalidJob: `jobs` is a single job, or one of them is wrong; the message begins with `jobs[NUMBER]`.
    """
    found = list[CheckedJob]()
    for number, item in enumerate(listed(jobs)):
        prompt, own = (item.prompt, item.options) if isinstance(item, Job) else (item, Options())
        try:
            found.append(checked_job(prompt, {**options, **own}))
        except InvalidJob as error:
            raise InvalidJob(f"jobs[{number}]: {error}") from error
    return found


def checked_texts(texts: Iterable[PromptLike]) -> list[PromptLike]:
    """Return texts, each of which can be a job's prompt.

    Raises:
        InvalidJob: `texts` is a single text, or one of them cannot be a prompt.
    """
    if isinstance(texts, str):
        raise InvalidJob("texts must be a list; put a single text into one")
    found = list(texts)
    for number, text in enumerate(found):
        try:
            encoded_prompt(text)
        except InvalidPrompt as error:
            raise InvalidPrompt(f"texts[{number}]: {error}") from error
    return found


def listed(jobs: Jobs) -> Jobs:
    """Return jobs, which may be produced lazily.

    Raises:
        InvalidJob: the argument is a single job.
    """
    if isinstance(jobs, (str, bytes, Job, Receipt)):
        raise InvalidJob(_NOT_A_LIST)
    return jobs


def check_options(options: Options, durability: str | None) -> None:
    """Check the options of many jobs, as far as possible without a server.

    Raises:
        InvalidJob: a value is wrong.
    """
    template(options)
    if durability is not None:
        read_durability(durability)


def durability_policy(durability: str | None, patience_s: float) -> DurabilityPolicy:
    """Return the durability policy of a client.

    Raises:
        InvalidJob: `durability` is not one.
    """
    return DurabilityPolicy(None if durability is None else read_durability(durability), min(patience_s, TIMEOUT_S))


def embedded_use(argument: str | None, waits: WaitNotifier) -> embedded.Use | None:
    """Use the embedded server, started if needed; return None if the argument or the environment names a server."""
    return None if config.redis_url(argument) else embedded.use(state_dir(), waits)


def link_settings(
    argument: str | None, use: embedded.Use | None, patience_s: float, waits: WaitNotifier
) -> LinkSettings:
    """Return the settings of a link to the server that the client uses."""
    if use is not None:
        return LinkSettings(use.url, patience_s, waits, use.revive)
    return LinkSettings(config.redis_url(argument) or "", patience_s, waits)
