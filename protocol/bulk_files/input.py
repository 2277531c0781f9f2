"""Read a bulk file: JSON lines, plain or in OpenAI's batch format.

An invalid line becomes a `BadLine` and does not stop the rest. Lines longer than any prompt are skipped.
"""

import gzip
import io
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import zstandard

from sluice.protocol.checks import is_listing, is_token_id
from sluice.protocol.errors import InvalidJob, InvalidSetting, did_you_mean
from sluice.protocol.jobs import OPTION_NAMES, PROMPTS, Options, PromptLike
from sluice.protocol.limits import MAX_CUSTOM_ID_CHARS, MAX_PROMPT_BYTES
from sluice.protocol.openai_format.embeddings import read_embedding_line
from sluice.protocol.openai_format.requests import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    LINE_ENDPOINTS,
    OF_TOOLS,
    PROMPT,
    RERANK,
    SAME,
    TRANSLATED,
    Endpoint,
    ManyPrompts,
    ReadRequest,
    RequestRefused,
    decoded_json,
    read_request,
    refusal,
)
from sluice.protocol.openai_format.reranking import read_rerank_line

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_LINE_BYTES = 4 * MAX_PROMPT_BYTES
"""Longest line: a prompt of the largest size with JSON escapes."""

MAX_BLANK_BYTES = 4 * MAX_LINE_BYTES
"""Most bytes of consecutive blank lines, of which a small compressed file can contain any number."""

MAX_SKIPPED_BYTES = 4 * 1024**3
"""Longest line that is skipped; a longer one ends the reading."""

READ_BYTES = 1024 * 1024
ZSTD_READ_BYTES = 1024
"""Compressed bytes per read of zstandard: four bytes can expand to 128 KiB."""

UTF8_BOM = b"\xef\xbb\xbf"
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
STDIN = "-"


@dataclass(frozen=True, slots=True)
class Line:
    """A valid line: one job, or several whose results are one body."""

    number: int
    """Number of the line, from 1, including blank lines."""

    custom_id: str | None
    endpoint: Endpoint
    """The endpoint whose response format the result takes."""

    prompt: PromptLike
    options: Options
    names: Mapping[str, str]
    """The line's names of the prompt and of renamed options, by ours."""

    many: ManyPrompts | None = None
    """The request of a line of several jobs; `prompt` is that of the first."""

    @property
    def prompts(self) -> Sequence[PromptLike]:
        """The prompts of its jobs."""
        return [self.prompt] if self.many is None else self.many.prompts

    @property
    def name(self) -> str:
        """The custom id, or `line-<number>`."""
        return self.custom_id or f"line-{self.number}"

    def refused(self, error: InvalidJob) -> "BadLine":
        """Return the bad line for this error in a value."""
        refused = refusal(error, self.names)
        return BadLine(self.number, self.custom_id, refused.code, refused.message, refused.param)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a valid job, and the reason."""

    number: int
    custom_id: str | None
    code: str
    """Error code: invalid_json, invalid_request, unsupported, duplicate_custom_id, too_large …"""

    message: str
    param: str | None = None

    @property
    def name(self) -> str:
        """The custom id if it is valid, or `line-<number>`."""
        return self.custom_id or f"line-{self.number}"


# ---------------------------------------------------------------- bytes


def is_stream(path: str) -> bool:
    """Return whether a path is not a regular file and can be read only once: standard input, a pipe or a device."""
    return path == STDIN or not Path(path).is_file()


@contextmanager
def opened(path: str) -> Generator[BinaryIO]:
    """Open a file, or standard input for `-`; gzip and zstandard are detected by their first bytes.

    Raises:
        OSError: the file cannot be read.
    """
    if path == STDIN:
        yield _plain(sys.stdin.buffer)
        return
    with Path(path).open("rb") as file:
        yield _plain(file)


def _plain(file: BinaryIO) -> BinaryIO:
    buffered = io.BufferedReader(cast("io.RawIOBase", file), READ_BYTES)
    magic = buffered.peek(4)[:4]
    if magic.startswith(GZIP_MAGIC):
        return cast("BinaryIO", gzip.GzipFile(fileobj=buffered))
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdFile(buffered), READ_BYTES)
    return buffered


class _ZstdFile(io.RawIOBase):
    """A stream of zstandard frames. Unlike the package's reader, it detects a truncated frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._is_within = False
        self._packed = b""
        self._ready = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "Buffer", /) -> int:
        """Read into the buffer; returns the number of bytes.

        Raises:
            EOFError: the last frame is truncated.
        """
        while not self._ready and self._fill():
            pass
        view = memoryview(buffer)
        data, self._ready = self._ready[: len(view)], self._ready[len(view) :]
        view[: len(data)] = data
        return len(data)

    def _fill(self) -> bool:
        self._packed = self._packed or self._file.read(ZSTD_READ_BYTES)
        if not self._packed:
            if self._is_within:
                raise EOFError("it ends within a frame")
            return False
        self._ready = self._frame.decompress(self._packed)
        self._is_within = not self._frame.eof
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        return True


def lines(file: BinaryIO, *, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and bytes of each line that is not blank; None instead of more than `MAX_LINE_BYTES`.

    `after`: number of lines of the file that have been read already.

    Raises:
        InvalidSetting: the compressed data is corrupt, or a line or a run of blank lines is too long.
    """
    number, num_blank_bytes = after, 0
    while line := _next_line(file, number):
        number += 1
        if number == 1:
            line = line.removeprefix(UTF8_BOM)
        stripped = line.strip()
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            _skip_line(file, number)
            yield number, None
        elif stripped:
            yield number, stripped
        num_blank_bytes = 0 if stripped else num_blank_bytes + len(line)
        if num_blank_bytes > MAX_BLANK_BYTES:
            raise InvalidSetting(f"over {MAX_BLANK_BYTES} bytes of blank lines before line {number} of the file")


def _next_line(file: BinaryIO, number: int) -> bytes:
    try:
        return file.readline(MAX_LINE_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise InvalidSetting(f"the file's compressed data is broken after line {number}: {error}") from error


def _skip_line(file: BinaryIO, number: int) -> None:
    num_skipped = 0
    while (piece := file.readline(READ_BYTES)) and not piece.endswith(b"\n"):
        num_skipped += len(piece)
        if num_skipped > MAX_SKIPPED_BYTES:
            raise InvalidSetting(f"line {number} is longer than {MAX_SKIPPED_BYTES} bytes: this is not a file of jobs")


# ---------------------------------------------------------------- lines


class LineReader:
    """A parser of lines. Keeps the custom ids that it has seen, because they must be unique in a file.

    Args:
        endpoint: Endpoint of lines without a `url`; None accepts plain lines.
        model: The only model that lines may name.
        defaults: Options that a line may override.
        of_batch: The endpoint that the `url` of each line must name, which makes all lines OpenAI batch requests.
        seen: Custom ids of lines before the first one that is read.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint | None,
        model: str | None,
        defaults: Options,
        of_batch: Endpoint | None = None,
        seen: Iterable[str] = (),
    ) -> None:
        self._of_batch: Endpoint | None = of_batch
        self._endpoint: Endpoint | None = endpoint
        self._model = model
        self._defaults = defaults
        self._seen = {*seen}

    def read(self, number: int, line: bytes | None) -> Line | BadLine:
        """Parse one line."""
        custom_id = None
        try:
            fields = _parsed(line)
            custom_id = self._custom_id(fields)
            request = self._request(fields)
            options: Options = {**self._defaults, **self._with_model(request.options)}
            return Line(number, custom_id, request.endpoint, request.prompt, options, request.names, request.many)
        except RequestRefused as refused:
            return BadLine(number, custom_id, refused.code, refused.message, refused.param)
        except RecursionError:
            return BadLine(number, custom_id, "invalid_request", "the line is nested too deeply")

    def _custom_id(self, fields: dict[str, Any]) -> str | None:  # Any: JSON, in all that follows
        custom_id = fields.get("custom_id")
        if custom_id is None:
            if "body" in fields or self._of_batch is not None:
                raise RequestRefused("missing_custom_id", "custom_id is missing", "custom_id")
            return None
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            raise RequestRefused("invalid_custom_id", message, "custom_id")
        if custom_id in self._seen:
            raise RequestRefused(
                "duplicate_custom_id", f"custom_id {custom_id!r} was used before in this file", "custom_id"
            )
        self._seen.add(custom_id)
        return custom_id

    def _request(self, fields: dict[str, Any]) -> ReadRequest:
        if "body" in fields:
            return _read(self._url(fields), fields["body"])
        if self._of_batch is not None:
            raise RequestRefused("missing_body", "body is missing", "body")
        rest = {name: value for name, value in fields.items() if name != "custom_id"}
        if self._endpoint is not None:
            return _read(self._endpoint, rest)
        return read_plain(rest)

    def _url(self, fields: dict[str, Any]) -> Endpoint:
        if unknown := fields.keys() - {"custom_id", "method", "url", "body"}:
            raise RequestRefused("invalid_request", f"unknown field {min(unknown)!r} next to body", min(unknown))
        if fields.get("method", "POST") != "POST":
            raise RequestRefused("invalid_method", f"method must be POST, got {fields['method']!r}", "method")
        url = fields.get("url", self._endpoint)
        if self._of_batch is not None:
            return _url_of_batch(url, self._of_batch)
        for endpoint in LINE_ENDPOINTS:
            if url == endpoint:
                return endpoint
        if url is None:
            raise RequestRefused("missing_url", "url is missing; give it in the line or as --endpoint", "url")
        raise _invalid_url(url)

    def _with_model(self, options: Options) -> Options:
        model = options.get("model")
        if self._model is None or model in (None, self._model):
            return options if self._model is None else {**options, "model": self._model}
        raise RequestRefused(
            "model_mismatch", f"the line asks for model {model!r}; --model says {self._model!r}", "model"
        )


def _read(endpoint: Endpoint, body: object) -> ReadRequest:
    if endpoint == RERANK:
        return read_rerank_line(body)
    if endpoint == EMBEDDINGS:
        return read_embedding_line(body)
    return read_request(endpoint, body)


def _url_of_batch(url: object, endpoint: Endpoint) -> Endpoint:
    if url is None:
        raise RequestRefused("missing_url", f"url is missing: it must be the batch's endpoint, {endpoint}", "url")
    if url not in LINE_ENDPOINTS:
        raise _invalid_url(url)
    if url != endpoint:
        message = f"the line's url is {url}, and the batch's endpoint {endpoint}"
        raise RequestRefused("mismatched_url", message, "url")
    return endpoint


def _invalid_url(url: object) -> RequestRefused:
    return RequestRefused("invalid_url", f"url must be one of {' and '.join(LINE_ENDPOINTS)}, got {url!r}", "url")


def _parsed(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise RequestRefused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    fields = decoded_json(line, "the line")
    if not isinstance(fields, dict):
        raise RequestRefused("invalid_json", f"the line must be a JSON object, not {type(fields).__name__}")
    return cast("dict[str, Any]", fields)


OWN = OPTION_NAMES - SAME - TRANSLATED - OF_TOOLS - {"stream", "awaited", "job_id", "batch", "echo"}
"""Options of plain lines besides the parameters of requests."""


def read_plain(line: Mapping[str, Any]) -> ReadRequest:
    """Read a plain line: options of jobs, and the parameters of a request, of the endpoint for its kind of prompt.

    Raises:
        RequestRefused: a parameter is unknown, not supported or of the wrong type.
    """
    fields = {name: value for name, value in line.items() if value is not None}
    prompts = [name for name in PROMPTS if name in fields]
    if len(prompts) != 1:
        message = "a line has one of prompt, messages, token_ids, or an OpenAI body"
        raise RequestRefused("invalid_request", message, "prompt")
    own = {name: fields.pop(name) for name in OWN & fields.keys()}
    request = _read_as(CHAT if prompts == ["messages"] else COMPLETIONS, prompts[0], fields)
    if own.get("embed") or own.get("classify"):
        request = replace(request, endpoint=EMBEDDINGS)
    for name in {"deadline", "not_before"} & own.keys():
        own[name] = _moment(name, own[name])
    return replace(request, options=cast("Options", {**own, **request.options}))


def _read_as(endpoint: Endpoint, name: str, fields: dict[str, Any]) -> ReadRequest:
    if name == "token_ids":
        fields["prompt"] = fields.pop("token_ids")
        if not is_listing(fields["prompt"], is_token_id):
            raise RequestRefused("invalid_request", "token_ids must be a list of token ids", "token_ids")
    try:
        request = read_request(endpoint, fields)
    except RequestRefused as error:
        if error.code != "unknown_parameter":
            raise
        hint = did_you_mean(error.param or "", SAME | TRANSLATED | OF_TOOLS | OWN)
        message = f"unknown option {error.param!r}; your own fields belong in metadata{hint}"
        raise RequestRefused(error.code, message, error.param) from None
    return replace(request, names={**request.names, PROMPT: name})


def _moment(name: str, value: object) -> datetime:
    try:
        return datetime.fromisoformat(cast("str", value))
    except (ValueError, TypeError) as error:
        raise RequestRefused(
            "invalid_request", f"{name} must be a time in ISO 8601 with a time zone, got {value!r}", name
        ) from error
