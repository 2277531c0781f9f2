"""The jobs of a schedule from the lines of a bulk file, for the command line and the gateway's page."""

from typing import BinaryIO

from sluice.producer.errors import InvalidJob
from sluice.protocol.bulk_files.input import BadLine, Line, LineReader, lines
from sluice.protocol.jobs import Job, Options, checked_job
from sluice.protocol.schedules.schedule import MAX_JOBS


def jobs_of_lines(file: BinaryIO, defaults: Options) -> list[Job]:
    """Return the jobs of a file; `defaults` are options that its lines may override.

    Raises:
        InvalidJob: a line is wrong, or there are too many.
    """
    reader, jobs = LineReader(endpoint=None, model=None, defaults=defaults), list[Job]()
    for number, text in lines(file):
        line = reader.read(number, text)
        if isinstance(line, BadLine):
            raise InvalidJob(f"line {number}: {line.message}")
        jobs += _jobs_of(line)
        if len(jobs) > MAX_JOBS:
            raise InvalidJob(f"a schedule has at most {MAX_JOBS} jobs: submit a larger file with `producer submit`")
    return jobs


def _jobs_of(line: Line) -> list[Job]:
    try:
        for prompt in line.prompts:
            checked_job(prompt, line.options)
    except InvalidJob as error:
        raise InvalidJob(f"line {line.number}: {line.refused(error).message}") from error
    return [Job(prompt, line.options) for prompt in line.prompts]
