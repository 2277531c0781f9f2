"""Read a producer's journal of acknowledged ids and its bulk file, line by line. Knows no server."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.protocol.bulk_files.input import Line, LineReader, lines, opened
from sluice.protocol.bulk_files.jobs import BulkSpec, LineJobs, bulk_spec_of
from sluice.protocol.bulk_files.journal import ASKED, RUN
from sluice.protocol.calls import NewJob
from sluice.protocol.errors import InvalidJob, InvalidSetting
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.wire import JobId, WireError
from sluice.worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JournalFile:
    """One journal."""

    path: Path
    runs: Mapping[int, BulkSpec]
    """How lines became jobs, for each run that recorded it."""

    @staticmethod
    def opened(path: Path) -> "JournalFile":
        """Read the runs of a journal.

        Raises:
            ConfigError: the journal cannot be read.
        """
        try:
            return JournalFile(path, dict(_runs(path)))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"the journal cannot be read: {error}"]) from error

    def ids(self, partition: int) -> Iterator[JobId]:
        """Iterate over the acknowledged jobs of a partition, of all runs."""
        with self.path.open() as file:
            for line in file:
                text = line.removesuffix("\n")
                if text != line and _partition_of(text) == partition:
                    yield JobId(text)


def _partition_of(text: str) -> int | None:
    """Return the partition of a job's id; None for another line."""
    try:
        return split_job_id(text)[0]
    except WireError:
        return None


def _runs(path: Path) -> Iterator[tuple[int, BulkSpec]]:
    run = 0
    with path.open() as file:
        for line in file:
            if line.startswith(RUN) and line[len(RUN) :].strip().isdigit():
                run = int(line[len(RUN) :])
            elif line.startswith(ASKED):
                try:
                    yield run, bulk_spec_of(json.loads(line[len(ASKED) :]))
                except (KeyError, TypeError, ValueError):
                    continue  # truncated by a crash; the next run writes it again


def jobs_of_file(path: Path, journal: JournalFile, job_ids: Sequence[JobId]) -> Iterator[tuple[JobId, NewJob | str]]:
    """Yield jobs of a bulk file, made again as in each run of its journal, or the reason why a job cannot be made."""
    missing = set(job_ids)
    for run, spec in journal.runs.items():
        for job in _jobs_of(path, run, spec) if missing else ():
            if job.id in missing:
                missing.discard(job.id)
                yield job.id, job
    for job_id in missing:
        yield job_id, f"no line of {path.name} becomes this job"


def _jobs_of(path: Path, run: int, spec: BulkSpec) -> Iterator[NewJob]:
    reader = LineReader(endpoint=spec.endpoint, model=spec.model, defaults=spec.defaults)
    made = LineJobs(spec, run=run)
    try:
        with opened(str(path)) as file:
            for line in (reader.read(number, text) for number, text in lines(file)):
                if isinstance(line, Line):
                    yield from _jobs_of_line(made, line)
    except (OSError, InvalidSetting) as error:
        raise ConfigError([f"--file cannot be read: {error}"]) from error


def _jobs_of_line(made: LineJobs, line: Line) -> list[NewJob]:
    """Make the jobs of a line; none of an invalid line, which was never submitted."""
    try:
        return made.jobs(line)
    except InvalidJob:
        return []
