"""Check the input file of a batch, a slice at a time, and keep the custom ids of its lines."""

from contextlib import suppress
from time import monotonic

from sluice.gateway.batches.batch import FAILED, IN_PROGRESS, BatchParts, error_of_line, printable
from sluice.gateway.batches.lines import FileCheck, Names, names_of
from sluice.gateway.batches.taken import TakenBatch, work_s
from sluice.gateway.faults import ContentMissing
from sluice.gateway.files.store import Stored
from sluice.protocol.openai_format.bodies import Object

INPUT_MISSING: Object = {"code": "file_not_found", "line": None, "message": "the input file is missing", "param": None}


def check_slice(taken: TakenBatch) -> bool:
    """Check a slice of the file; return whether it was the last one, so that the batch has its next status.

    Raises:
        BatchLost: another task has the batch, or its status has changed.
        StorageUnavailable: the file or stored results cannot be read now.
    """
    began_s = monotonic()
    slices = _Slices(taken)
    check = slices.read()
    try:
        with taken.input() as file:
            is_over = check.run(file, taken.tick, work_s(began_s))
    except ContentMissing:
        _fail(taken, INPUT_MISSING)
        return True
    if is_over:
        _end(taken, check)
    else:
        slices.keep(check)
    return is_over


class _Slices:
    """The stored results of checked slices. Changes as slices are kept."""

    def __init__(self, taken: TakenBatch) -> None:
        self._taken = taken

    def read(self) -> FileCheck:
        """Return the check as far as it was done; start again if stored results are lost."""
        taken, storage = self._taken, self._taken.workshop.storage
        with suppress(ContentMissing, ValueError):
            return FileCheck(taken.row, [storage.get(part.key) for part in taken.row.parts.checked])
        taken.change(parts=BatchParts())
        return FileCheck(taken.row)

    def keep(self, check: FileCheck) -> None:
        """Store a slice, merged with those before it that are not larger, so that the number of objects stays small."""
        taken, kept = self._taken, [*self._taken.row.parts.checked]
        while kept and kept[-1].num_lines <= check.num_lines(since=len(kept)):
            kept.pop()
        since = len(kept)
        data, replaced = check.new_lines(since), taken.row.parts.checked[since:]
        key = taken.put(f"checked-{since:05d}", data)
        new = Stored(key=key, num_bytes=len(data), num_lines=check.num_lines(since))
        taken.change(parts=BatchParts(checked=(*kept, new)))
        taken.delete(*(part.key for part in replaced))


def _end(taken: TakenBatch, check: FileCheck) -> None:
    row, model = taken.row, check.model and printable(check.model)
    if check.errors:
        _fail(taken, *map(error_of_line, check.errors))
    elif model != row.model:
        message = f"the lines name model {model!r}, and the batch was created for {row.model!r}"
        _fail(taken, {"code": "mismatched_model", "line": 1, "message": message, "param": "body.model"})
    else:
        names = check.names
        taken.move(IN_PROGRESS, total=len(names.custom_ids), names=_put_names(taken, names), parts=BatchParts())
    taken.delete(*(part.key for part in row.parts.checked))


def _fail(taken: TakenBatch, *errors: Object) -> None:
    taken.move(FAILED, errors=list(errors), parts=BatchParts())


def _put_names(taken: TakenBatch, names: Names) -> str:
    return taken.put("names", names.encoded())


def kept_names(taken: TakenBatch) -> Names:
    """Read the custom ids, from the file if they are lost.

    Raises:
        ContentMissing: they are lost, and the file was deleted or changed.
        StorageUnavailable: neither can be read now.
    """
    assert taken.row.names is not None, "a batch with lines has their names"
    with suppress(ContentMissing, ValueError):
        return names_of(taken.workshop.storage.get(taken.row.names))
    names = _names_in_file(taken)
    taken.change(names=_put_names(taken, names))
    return names


def _names_in_file(taken: TakenBatch) -> Names:
    check = FileCheck(taken.row)
    with taken.input() as file:
        check.run(file, taken.tick)
    names = check.names
    if len(names.custom_ids) != taken.row.total:
        raise ContentMissing("the input file has changed since the batch was created")
    return names
