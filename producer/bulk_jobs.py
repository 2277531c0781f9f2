"""Lines of a bulk file -> jobs, the same ones whoever reads the file again. Knows no server.

A job's id is drawn from what its line asks for, its custom id (or how often the same was asked before in the file), the
batch and the run; its seed too.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, cast

from producer.bulk_input import Endpoint, Line
from producer.contract.calls import NewJob
from producer.contract.wire import JobId
from producer.jobs import Options, Template, partition_of, template

NAME_BYTES = 12
MAX_TEMPLATES = 1024
"""Options kept encoded: most files have few kinds of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All that decides, beside a file's lines, which jobs they become."""

    batch: str
    endpoint: Endpoint | None = None
    model: str | None = None
    defaults: Options = field(default_factory=Options)
    partitions: int = 1

    def as_json(self) -> dict[str, Any]:
        """For the journal; what was said from now on becomes a point in time."""
        moments = {name: _at(value) for name, value in self.defaults.items() if isinstance(value, timedelta | datetime)}
        return {
            "batch": self.batch,
            "endpoint": self.endpoint,
            "model": self.model,
            "defaults": {**self.defaults, **moments},
            "partitions": self.partitions,
        }


def drawing_of(written: Mapping[str, Any]) -> Drawing:  # Any: JSON
    """What `as_json` wrote.

    Raises:
        KeyError, TypeError, ValueError: it did not write this.
    """
    defaults = dict(written["defaults"])
    for name in ("deadline", "not_before"):
        if name in defaults:
            defaults[name] = datetime.fromisoformat(defaults[name])
    return Drawing(
        batch=str(written["batch"]),
        endpoint=written["endpoint"],
        model=written["model"],
        defaults=cast("Options", defaults),
        partitions=int(written["partitions"]),
    )


def _at(moment: timedelta | datetime) -> str:
    return (datetime.now(UTC) + moment if isinstance(moment, timedelta) else moment).isoformat()


class LineJobs:
    """Makes the jobs of one run over one file, in the file's order: it counts what was asked before."""

    def __init__(self, drawing: Drawing, *, run: int = 0) -> None:
        self.run = run
        self._drawing = drawing
        self._templates: dict[str, Template] = {}
        self._asked: Counter[bytes] = Counter()

    def job(self, line: Line) -> NewJob:
        """The job of a line.

        Raises:
            InvalidJob: the line asks for what no job may.
        """
        made = self.template(line.options)
        prompt = made.encode(line.prompt)
        which = line.custom_id
        if which is None:
            which = f"#{self._asked[prompt.digest]}"
            self._asked[prompt.digest] += 1
        identity = f"{self._drawing.batch}\n{self.run}\n{which}\n".encode() + prompt.digest
        drawn = blake2b(identity, digest_size=NAME_BYTES + 8).digest()
        name = drawn[:NAME_BYTES].hex()
        job_id = JobId(f"{partition_of(name, self._drawing.partitions)}.{made.tenant}.{name}")
        # The seed too: the same line, submitted twice, is the same job in everything.
        return made.job_of(prompt, job_id, int.from_bytes(drawn[NAME_BYTES:]))

    def template(self, options: Options) -> Template:
        """The options of a line, checked and encoded.

        Raises:
            InvalidJob: a name is unknown or a value is out of its range.
        """
        key = repr(options)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            options = {"stream": False, **options, "batch": self._drawing.batch}
            found = self._templates[key] = template(options, partitions=self._drawing.partitions)
        return found
