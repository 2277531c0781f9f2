"""Check that a file's lines have the same names as in earlier runs. No I/O.

A job's identity depends on the content of its line, but the default name `line-N` on its position.
"""

from collections.abc import Iterable

from sluice.producer.bulk.files import LineFile
from sluice.producer.errors import InvalidJob, ProducerError
from sluice.protocol.bulk_files.input import BadLine, Line
from sluice.protocol.bulk_files.jobs import LineJobs
from sluice.protocol.bulk_files.journal import Journal, name_of


class LinesRenamed(ProducerError):
    """Lines of the file have different names than in an earlier run; nothing was submitted."""


def check_names(lines: Iterable[Line | BadLine], jobs: LineJobs, journal: Journal, output: LineFile) -> None:
    """Check that each job has the same name as before, and that the output has no other job's result with that name.

    Raises:
        LinesRenamed: joining results and lines by name would give wrong pairs.
    """
    taken_by = output.custom_ids()
    num_moved = num_taken = 0
    first_moved, first_taken = ("", ""), ""
    for line in lines:
        if isinstance(line, BadLine) or (name := _name_of_job(line, jobs)) is None:
            continue
        number = None if line.custom_id else journal.number_of(name)
        before = output.custom_id_of(name) or (line.name if number is None else f"line-{number}")
        if before != line.name:
            first_moved = first_moved if num_moved else (before, line.name)
            num_moved += 1
        elif taken_by.get(line.name, name) != name:
            first_taken = first_taken or line.name
            num_taken += 1
    if num_moved:
        before, now = first_moved
        raise LinesRenamed(
            f"nothing was submitted: {num_moved} lines have different numbers than in an earlier run of this batch, "
            f"for example {before} is now {now}. Results and the history have the old numbers. Put the lines back "
            "(leave a blank line where you removed one, and add new ones at the end), or run the file as a new --batch "
            "with other output files. Lines with a custom_id may move."
        )
    if num_taken:
        raise LinesRenamed(
            f"nothing was submitted: the output has results of other jobs under the names of {num_taken} lines, for "
            f"example {first_taken}. The lines or the options were changed, or another batch wrote the file. Remove "
            "these results from it, or give another file with -o."
        )


def _name_of_job(line: Line, jobs: LineJobs) -> str | None:
    try:
        return name_of(jobs.job(line).id)
    except InvalidJob:
        return None
