"""A producer's journal of acknowledged ids, and the bulk file it is of: read line by line. Knows no server."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from producer.bulk_input import Line, LineReader, lines, opened
from producer.bulk_jobs import Drawing, LineJobs, drawing_of
from producer.contract.calls import NewJob
from producer.contract.wire import JobId, WireError, split_job_id
from producer.errors import InvalidJob, InvalidSetting
from producer.journal import ASKED, RUN
from worker.errors import ConfigError


@dataclass(slots=True, eq=False)
class JournalFile:
    """One journal. Changes: it counts what it cannot read."""

    path: Path
    runs: Mapping[int, Drawing]
    """How lines became jobs, for each run that says so."""

    num_nameless: int = 0
    """Lines of an older release, which name no tenant."""

    @staticmethod
    def opened(path: Path) -> "JournalFile":
        """Read what it says of its runs.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return JournalFile(path, dict(_runs(path)))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([f"the journal cannot be read: {error}"]) from error

    def ids(self, partition: int) -> Iterator[JobId]:
        """Every acknowledged job of a partition, of all runs."""
        self.num_nameless = 0
        with self.path.open() as file:
            for line in file:
                text = line.rstrip("\n")
                if not line.endswith("\n") or text.startswith((RUN, ASKED)) or not text:
                    continue
                if "." not in text:
                    self.num_nameless += 1
                elif _partition_of(text) == partition:
                    yield JobId(text)


def _partition_of(text: str) -> int | None:
    try:
        return split_job_id(text)[0]
    except WireError:
        return None


def _runs(path: Path) -> Iterator[tuple[int, Drawing]]:
    run = 0
    with path.open() as file:
        for line in file:
            if line.startswith(RUN) and line[len(RUN) :].strip().isdigit():
                run = int(line[len(RUN) :])
            elif line.startswith(ASKED):
                try:
                    yield run, drawing_of(json.loads(line[len(ASKED) :]))
                except (KeyError, TypeError, ValueError):
                    continue  # torn by a crash; the next run of the command writes it again


@dataclass(frozen=True, slots=True)
class FileJobs:
    """The jobs of a bulk file, drawn again as the journal says that they were."""

    path: Path
    journal: JournalFile

    def jobs(self, job_ids: Sequence[JobId]) -> Iterator[tuple[JobId, NewJob | str]]:
        """See `LostJobs`; one pass over the file for each run of the journal."""
        wanted = set(job_ids)
        for run, drawing in self.journal.runs.items():
            for job in self._drawn(run, drawing) if wanted else ():
                if job.id in wanted:
                    wanted.discard(job.id)
                    yield job.id, job
        for job_id in wanted:
            yield job_id, f"no line of {self.path.name} becomes this job"

    def _drawn(self, run: int, drawing: Drawing) -> Iterator[NewJob]:
        reader = LineReader(endpoint=drawing.endpoint, model=drawing.model, defaults=drawing.defaults)
        made = LineJobs(drawing, run=run)
        try:
            with opened(str(self.path)) as file:
                for line in (reader.read(number, text) for number, text in lines(file)):
                    if isinstance(line, Line) and (job := _job(made, line)) is not None:
                        yield job
        except (OSError, InvalidSetting) as error:
            raise ConfigError([f"--file cannot be read: {error}"]) from error


def _job(made: LineJobs, line: Line) -> NewJob | None:
    """A bad line was none when it was submitted, either."""
    try:
        return made.job(line)
    except InvalidJob:
        return None
