"""Jobs that the queue keeps before they are submitted, as values for msgpack: of a schedule, and blocked ones."""

from typing import Any

from sluice.protocol.calls import FromNow, NewJob, SourceLine
from sluice.protocol.wire import JobId

_FIELDS = (
    *("spec", "payload", "priority", "prompt_tokens", "prompt_bytes", "max_tokens", "is_length_stated", "choices"),
    *("digest", "batch", "ttl_ms", "wants_callback"),
)
_MOMENTS = ("not_before_ms", "deadline_ms")


def stored_job(job: NewJob) -> dict[str, Any]:  # Any: values of a NewJob
    """Return a job without its id. Its durations count from its submit."""
    source = job.source
    return {
        **{name: getattr(job, name) for name in _FIELDS},
        "features": list(job.features),
        "seed": str(job.seed),
        "source": None if source is None else [source.custom_id, source.number, source.endpoint],
        **{name: _stored_moment(getattr(job, name)) for name in _MOMENTS},
    }


def _stored_moment(moment: int | FromNow | None) -> int | list[int] | None:
    """Return a duration as a number, and a point in time as a list of one."""
    return moment.ms if isinstance(moment, FromNow) else None if moment is None else [moment]


def read_job(stored: dict[str, Any], job_id: JobId, drawn_seed: int = 0) -> NewJob:  # Any: msgpack
    """Return a stored job, with `drawn_seed` if it has no seed of its own.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: the values are not those of a job.
    """
    seed, source = stored["seed"], stored.get("source")
    return NewJob(
        id=job_id,
        seed=drawn_seed if seed is None else int(seed),
        features=tuple(stored["features"]),
        source=None if source is None else SourceLine(custom_id=source[0], number=source[1], endpoint=source[2]),
        **{name: _read_moment(stored[name]) for name in _MOMENTS},
        **{name: stored[name] for name in _FIELDS},
    )


def _read_moment(moment: int | list[int] | None) -> int | FromNow | None:
    return moment[0] if isinstance(moment, list) else None if moment is None else FromNow(moment)
