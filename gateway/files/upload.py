"""Read an upload: `multipart/form-data` with one file, which is streamed to the storage and never whole in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from sluice.gateway.arrival.shares import share_of
from sluice.gateway.errors import bad_request
from sluice.gateway.files.storage import PIECE_BYTES, ObjectWriter, Storage
from sluice.gateway.refusals import refusal
from sluice.gateway.tables.quota import Incoming
from sluice.gateway.threads import FILES
from sluice.protocol.bounds import FILE_MIB
from sluice.protocol.checks import whole

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FILE = "file"
MAX_FIELD_BYTES = 4096
MAX_TYPE_CHARS = 1000
MAX_BOUNDARY_BYTES = 70
"""The limit of RFC 2046."""

MAX_PARTS = 16
MAX_NAME_CHARS = 512
FORM_BYTES = 64 * 1024
"""Most bytes that a form may have besides its file."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A received form whose file is in the storage."""

    fields: dict[str, str]
    filename: str
    num_bytes: int


async def receive(request: Request, storage: Storage, key: str, max_bytes: int, incoming: Incoming) -> Uploaded:
    """Store the file of a form under a key. Nothing is left of an upload that fails or whose client leaves.

    Raises:
        HttpError: the file is too large, the tenant has no room, or the body is not a form with one file.
        HistoryUnavailable: the tenant's stored bytes cannot be read.
        StorageUnavailable: the file cannot be written.
        ClientDisconnect: the client left.
    """
    boundary = _boundary(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes + FORM_BYTES:
        raise _too_large(max_bytes)
    held = share_of(request)
    held.reserve(storage.buffer_bytes)
    writer = await FILES.run(storage.create, key)
    is_whole = False
    try:
        form = _Form(boundary, max_bytes)
        async for piece in request.stream():
            held.take(len(piece))
            form.feed(piece)
            if len(form.pending) >= PIECE_BYTES:
                await incoming.receive(len(form.pending))
                await _write(writer, form)
                held.give_back()
        await incoming.receive(len(form.pending))
        await _write(writer, form)
        uploaded = form.result()
        await FILES.run(writer.close)
        is_whole = True
        return uploaded
    finally:
        if not is_whole:
            await _finish(FILES.run(writer.abandon))


def announced_bytes(request: Request) -> int:
    """Return the approximate size of a form's file from the request's Content-Length; 1 without one."""
    return max(1, (whole(request.headers.get("content-length", "")) or 0) - FORM_BYTES)


async def _write(writer: ObjectWriter, form: "_Form") -> None:
    pending, form.pending = form.pending, bytearray()
    # Finished also when the request is cancelled: the writer is not used from two threads at once.
    await _finish(FILES.run(writer.write, pending))


async def _finish(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


class _Form:
    """A form that is being received. `pending` is the part of its file to write next. Changes with each piece."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self.pending = bytearray()
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._header_name, self._header_value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._add: Callable[[bytes], None] = self._add_nothing
        self._num_parts, self._is_over, self._num_bytes_after = 0, False, 0
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value_part,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
            "on_end": self._ends,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, piece: bytes) -> None:
        """Read a piece of the body.

        Raises:
            HttpError: the body is not a form, or too large.
        """
        if self._is_over:
            self._num_bytes_after += len(piece)
            if self._num_bytes_after > FORM_BYTES:
                raise bad_request("the body goes on after the end of the form")
        try:
            self._parser.write(piece)
        except MultipartParseError as error:
            raise bad_request(f"the body is not a form: {error}") from error

    def result(self) -> Uploaded:
        """Return the complete form.

        Raises:
            HttpError: the form ends early, or has no file.
        """
        if not self._is_over:
            raise bad_request("the form ends early")
        if self._filename is None:
            raise bad_request("the form has no file", code="missing_required_parameter", param=FILE)
        fields = {name: value.decode(errors="replace") for name, value in self._fields.items()}
        return Uploaded(fields, self._filename, self._num_bytes)

    def _part_begins(self) -> None:
        self._headers = {}
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise bad_request(f"the form has more than {MAX_PARTS} parts")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_value_part(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        # Some clients send a non-ASCII name as filename*, which the parser drops.
        if name != FILE and b"filename" not in options:
            self._add = self._adder_of(self._fields.setdefault(name, bytearray()), name)
            return
        if name != FILE or self._filename is not None:
            raise bad_request("the form must have one file, named 'file'", param=FILE)
        filename = options.get(b"filename", b"").decode(errors="replace").replace("\0", "")
        self._filename = filename[:MAX_NAME_CHARS] or "upload.jsonl"
        self._add = self._add_to_file

    def _adder_of(self, field: bytearray, name: str) -> Callable[[bytes], None]:
        def add(data: bytes) -> None:
            field.extend(data)
            if len(field) > MAX_FIELD_BYTES:
                raise bad_request(f"the form's field {name[:64]!r} is larger than {MAX_FIELD_BYTES} bytes")

        return add

    def _add_nothing(self, data: bytes) -> None: ...

    def _add_to_file(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self.pending += data

    def _ends(self) -> None:
        self._is_over = True


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type[:MAX_TYPE_CHARS])
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise bad_request("send a form: content-type multipart/form-data")
    if len(boundary) > MAX_BOUNDARY_BYTES:
        raise bad_request(f"the form's boundary has {len(boundary)} bytes; at most {MAX_BOUNDARY_BYTES} are allowed")
    return boundary


def _too_large(max_bytes: int) -> Exception:
    return refusal(FILE_MIB, f"the file is larger than {max_bytes} bytes", param=FILE)
