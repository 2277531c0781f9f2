"""What is fuzzed: each target takes bytes, and may end in nothing but a value or an error of the package."""

import io
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sluice.history.rows import changes_of
from sluice.producer.errors import BadOffset, InvalidJob, InvalidSetting
from sluice.producer.operations.follow import Reader, cursor_at
from sluice.producer.operations.operation import channel_rows
from sluice.producer.operations.queue import Queue
from sluice.producer.operations.submission import submit_jobs
from sluice.protocol.bulk_files.input import LineReader, lines
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.jobs import OPTION_NAMES, Options, template
from sluice.protocol.packing import pack_for_script
from sluice.protocol.redis import urls
from sluice.protocol.wire import (
    JobId,
    WireError,
    decode_entry,
    decode_events,
    decode_prompt,
    decode_record,
    decode_resolved,
    decode_result,
    decode_spec,
)
from sluice.worker.model.translate import read_spec
from tests.fuzz import inputs
from tests.protocol.wire_examples import golden_bytes

Make = Callable[[random.Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """One way in."""

    make: Make
    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    """Errors that say what is wrong with the input."""


SPECS = golden_bytes(decode_spec)
ENTRIES = golden_bytes(decode_entry)
PROMPTS = golden_bytes(decode_prompt)
RESULTS = golden_bytes(decode_result)
RECORDS = golden_bytes(decode_record)
_SUBMITTED = {"queue": "q", "priority": 1, "prompt_tokens": 3, "spec": SPECS[-1], "seed": "7", "prompt": PROMPTS[0]}
_ENDED = {"state": "done", "epoch": 1, "attempt": 1, "incarnation": "w", "record": RECORDS[0], "result": RESULTS[0]}
EVENTS = [
    pack_for_script([["submitted", "0.t.a", 1, 1_800_000_000_000, _SUBMITTED]]),
    pack_for_script([["started", "0.t.a", 2, 5, {"epoch": 1}], ["ended", "0.t.a", 3, 9, _ENDED]]),
]
LINES = [
    b'{"prompt": "hi", "max_tokens": 3}',
    b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": '
    b'[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 5, "stop": ["a"]}}',
    b'{"custom_id": "2", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "logprobs": 2}}',
]
_TEXT: Make = lambda random_: inputs.text(random_).encode(errors="surrogatepass")  # noqa: E731


def _as_text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _read_line(data: bytes) -> object:
    return LineReader(endpoint=None, model=None, defaults=Options()).read(1, data)


def _read_file(data: bytes) -> object:
    return sum(1 for _ in lines(cast("Any", opened_file_of(data))))


def opened_file_of(data: bytes) -> object:
    """What the bulk reader makes of a file with this in it."""
    from sluice.protocol.bulk_files.input import _plain  # pyright: ignore[reportPrivateUsage]

    return _plain(io.BytesIO(data))


def _compressed(random_: random.Random) -> bytes:
    import gzip

    import zstandard

    content = b"\n".join(random_.choice(LINES) for _ in range(random_.randrange(9)))
    made = random_.choice((gzip.compress(content, mtime=0), zstandard.compress(content), content))
    return inputs.damaged(random_, [made]) if random_.random() < 0.8 else made


def _option_values(random_: random.Random) -> bytes:
    names = sorted(OPTION_NAMES)
    return json.dumps(
        {random_.choice(names): inputs.value(random_) for _ in range(random_.randrange(4))}, default=repr, skipkeys=True
    ).encode(errors="replace")


def _options(data: bytes) -> object:
    try:
        given = json.loads(data)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    return next(submit_jobs(Queue("q"), [(template(cast("Options", given)).new_job("hi"), False)]))


def _feed(data: bytes) -> object:
    reader = Reader(Queue("q"), JobId("0.t.a"))
    return list(reader.feed(decode_entry(entry) for _, entry in channel_rows([(b"1-0", [b"e", data])])))


def _history(data: bytes) -> object:
    events = decode_events(data)
    for event in events:
        split_job_id(event.job_id)
    return changes_of("q", events, keep_prompts="full")


TARGETS: Mapping[str, Target] = {
    "spec": Target(inputs.message(SPECS), decode_spec, (WireError, InvalidJob)),
    "worker_spec": Target(inputs.message(SPECS), read_spec, ()),
    "prompt": Target(inputs.message(PROMPTS), decode_prompt, (WireError, InvalidJob)),
    "entry": Target(inputs.message(ENTRIES), decode_entry, (WireError,)),
    "stream_entry": Target(inputs.message(ENTRIES), _feed, (WireError,)),
    "result": Target(inputs.message(RESULTS), decode_result, (WireError,)),
    "record": Target(inputs.message(RECORDS), decode_record, (WireError,)),
    "resolved": Target(inputs.message(golden_bytes(decode_resolved)), decode_resolved, (WireError,)),
    "events": Target(inputs.message(EVENTS), decode_events, (WireError,)),
    "history": Target(inputs.message(EVENTS), _history, (WireError,)),
    "line": Target(inputs.line(LINES), _read_line, ()),
    "file": Target(_compressed, _read_file, (InvalidSetting,)),
    "options": Target(_option_values, _options, (InvalidJob,)),
    "job_id": Target(_TEXT, lambda data: split_job_id(_as_text(data)), (WireError,)),
    "cursor": Target(_TEXT, lambda data: cursor_at(_as_text(data)), (BadOffset,)),
    "cluster_url": Target(
        _TEXT, lambda data: urls.read_cluster_url(f"redis+cluster://{_as_text(data)}"), (ValueError,)
    ),
}
