"""Convert the lines of a bulk file to jobs, deterministically: the same file always gives the same jobs. No I/O.

The id and the seed of a job are derived from the content of its line, its custom id (or the number of equal lines
before it), the tenant, the queue, the batch and the run.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, cast

from sluice.protocol.bulk_files.input import Line
from sluice.protocol.calls import NewJob, SourceLine
from sluice.protocol.errors import InvalidJob
from sluice.protocol.job_ids import job_id_of
from sluice.protocol.jobs import Options, Template, partition_of, template
from sluice.protocol.openai_format.requests import Endpoint
from sluice.protocol.wire import JobId

NAME_BYTES = 12
MAX_TEMPLATES = 1024
"""Most encoded options that are cached; most files have few combinations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSpec:
    """The parameters that, with the lines of a file, determine its jobs."""

    queue: str
    batch: str
    endpoint: Endpoint | None = None
    model: str | None = None
    defaults: Options = field(default_factory=Options)
    partitions: int = 1

    def as_json(self) -> dict[str, Any]:
        """Return the parameters as JSON for the journal; relative times become points in time."""
        moments = {name: _at(value) for name, value in self.defaults.items() if isinstance(value, timedelta | datetime)}
        return {
            "queue": self.queue,
            "batch": self.batch,
            "endpoint": self.endpoint,
            "model": self.model,
            "defaults": {**self.defaults, **moments},
            "partitions": self.partitions,
        }


def bulk_spec_of(written: Mapping[str, Any]) -> BulkSpec:  # Any: JSON
    """Parse the output of `BulkSpec.as_json`.

    Raises:
        KeyError, TypeError, ValueError: the object is not valid.
    """
    defaults = dict(written["defaults"])
    for name in ("deadline", "not_before"):
        if name in defaults:
            defaults[name] = datetime.fromisoformat(defaults[name])
    return BulkSpec(
        queue=str(written["queue"]),
        batch=str(written["batch"]),
        endpoint=written["endpoint"],
        model=written["model"],
        defaults=cast("Options", defaults),
        partitions=int(written["partitions"]),
    )


def _at(moment: timedelta | datetime) -> str:
    return (datetime.now(UTC) + moment if isinstance(moment, timedelta) else moment).isoformat()


class LineJobs:
    """A builder of the jobs of one run over one file, in the file's order. It counts equal lines."""

    def __init__(self, spec: BulkSpec, *, run: int = 0) -> None:
        self._run = run
        self._spec = spec
        self._templates: dict[str, Template] = {}
        self._asked: Counter[tuple[str, bytes]] = Counter()

    def job(self, line: Line) -> NewJob:
        """Build the job of a line, or the first of several. Its name is that of the line.

        Raises:
            InvalidJob: the line has an invalid value.
        """
        template, whole = self.template(line.options), _digest_of_prompts(line)
        return template.new_job(
            line.prompt, lambda digest: self._identity(line.custom_id, template.tenant, digest + whole), _source(line)
        )

    def jobs(self, line: Line) -> list[NewJob]:
        """Build all jobs of a line, in the order of its prompts.

        Raises:
            InvalidJob: the line has an invalid value.
        """
        first, template, source = self.job(line), self.template(line.options), _source(line)
        others = [
            template.new_job(
                prompt, lambda digest, index=index: self._further(first.id, index, template.tenant, digest), source
            )
            for index, prompt in enumerate(line.prompts[1:], start=1)
        ]
        return [first, *others]

    def _further(self, first: JobId, index: int, tenant: str, digest: bytes) -> tuple[JobId, int]:
        """Return id and seed of a further job of a line."""
        return self._drawn(json.dumps([first, index]).encode() + digest, tenant)

    def _identity(self, custom_id: str | None, tenant: str, digest: bytes) -> tuple[JobId, int]:
        which: str | int
        if custom_id is not None:
            which = custom_id
        else:
            which = self._asked[tenant, digest]
            self._asked[tenant, digest] += 1
        identity = json.dumps([self._spec.queue, self._spec.batch, self._run, tenant, which]).encode() + digest
        return self._drawn(identity, tenant)

    def _drawn(self, identity: bytes, tenant: str) -> tuple[JobId, int]:
        drawn = blake2b(identity, digest_size=NAME_BYTES + 8).digest()
        name = drawn[:NAME_BYTES].hex()
        job_id = job_id_of(partition_of(name, self._spec.partitions), tenant, name)
        # The seed is derived, too, so that a line that is submitted twice is the same job.
        return job_id, int.from_bytes(drawn[NAME_BYTES:])

    def template(self, options: Options) -> Template:
        """Check and encode the options of a line.

        Raises:
            InvalidJob: a name is unknown or a value is out of its range.
        """
        try:
            key = repr(options)
        except RecursionError as error:
            raise InvalidJob("an option is nested too deeply") from error
        cached = self._templates.get(key)
        if cached is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            options = {"stream": False, **options, "batch": self._spec.batch}
            cached = self._templates[key] = template(options)
        return cached


def _source(line: Line) -> SourceLine:
    return SourceLine(custom_id=line.name, number=line.number, endpoint=line.endpoint)


def _digest_of_prompts(line: Line) -> bytes:
    """Return a digest of the prompts of a line of several; empty for one, whose job has its own."""
    if line.many is None:
        return b""
    return blake2b(json.dumps(line.many.prompts).encode(), digest_size=16).digest()
