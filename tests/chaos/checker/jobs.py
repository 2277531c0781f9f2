"""Check one job: its state, its channels, its result, against the reference run. Each finding begins with its kind."""

from array import array
from collections.abc import Iterator

from tests.chaos.checker.evidence import Asked, Expected
from tests.chaos.checker.formats import ENDS, Choice, Entry, Job

HOUR_MS = 3_600_000
DEAD_KEPT_MS = 14 * 24 * HOUR_MS
EMPTY_CHANNEL_KEPT_MS = 60_000
NEAR = 1e-4
"""Least difference of two numbers of vectors that is no rounding."""

Settings = dict[str, str]


def check_job(job: Job, asked: Asked, reference: tuple[Expected, ...], settings: Settings) -> Iterator[str]:
    """Yield findings about one job of a drained queue."""
    if not job.fields:
        if asked.is_acknowledged:
            yield "lost: it was acknowledged and the queue does not know it"
        return
    if job.state not in ENDS:
        yield f"unfinished: it is {job.state}"
        return
    if job.state not in asked.ends:
        why = f"{job.fields.get('error_code')}: {job.fields.get('error')}"
        yield f"ended otherwise: it is {job.state} ({why}) and should be {' or '.join(sorted(asked.ends))}"
    if job.has_lease:
        yield "lease left: it has ended and is still leased"
    if job.number("choices") != len(reference):
        yield f"choices: it has {job.number('choices')} and was asked for {len(reference)}"
        return
    for choice, expected in enumerate(reference):
        yield from _check_choice(job, choice, expected)
    yield from _check_result(job, reference)
    yield from _check_kept(job, settings)


def _check_choice(job: Job, choice: int, expected: Expected) -> Iterator[str]:
    entries, where = job.channels[choice], f"choice {choice}"
    if entries is None:
        if job.state == "done" and job.number("silent") and job.result is not None:
            yield from _check_tokens(job, job.result[choice].ids, job.result[choice].text, expected, where)
        elif job.published[choice][0]:
            yield f"channel gone: {where} had {job.published[choice][0]} tokens"
        return
    yield from _check_offsets(entries, where)
    yield from _check_ends(job, entries, choice)
    ids = tuple(one for entry in entries for one in entry.ids)
    text = "".join(entry.text for entry in entries)
    if job.published[choice][0] != len(ids):
        yield f"published: {where} has {len(ids)} tokens on its channel and {job.published[choice][0]} in the job"
    yield from _check_tokens(job, ids, text, expected, where)


def _check_offsets(entries: tuple[Entry, ...], where: str) -> Iterator[str]:
    """Each entry begins at the end of the one before, and its id holds its end."""
    offset = 0
    for entry in entries:
        if entry.start < offset:
            yield f"twice: {where} has tokens {entry.start} to {offset} again"
        elif entry.start > offset:
            yield f"gap: {where} lacks tokens {offset} to {entry.start}"
        offset = entry.start + len(entry.ids)
        if entry.tokens != offset:
            yield f"entry id: {where} has an entry of id {entry.tokens} that ends at {offset}"


def _check_ends(job: Job, entries: tuple[Entry, ...], choice: int) -> Iterator[str]:
    """Exactly one end, the last, with its own id and the job's state (done where this choice was)."""
    ends = [entry for entry in entries if entry.end is not None]
    if len(ends) != 1:
        yield f"ends: choice {choice} has {len(ends)} of them"
        return
    [last] = ends
    if last is not entries[-1]:
        yield f"ends: choice {choice} has tokens after its end"
    if last.tail != 1 + job.number("requeues"):
        yield f"ends: that of choice {choice} has the id {last.tokens}-{last.tail}"
    state = (last.end or {}).get("state")
    if state != job.state and (state != "done" or job.number("choices") == 1):
        yield f"ends: choice {choice} says {state} and the job is {job.state}"


def _check_tokens(job: Job, ids: tuple[int, ...], text: str, expected: Expected, where: str) -> Iterator[str]:
    """A done job has the output of the expected run; another job has a prefix of it."""
    if job.state == "done" and (ids, text) == (expected.ids, expected.text):
        return
    if ids != expected.ids[: len(ids)]:
        pairs = enumerate(zip(ids, expected.ids, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), len(expected.ids))
        yield f"tokens: {where} differs from the undisturbed run at token {at}"
    elif not expected.text.startswith(text):
        yield f"text: {where} says {text[-40:]!r} where the undisturbed run says {expected.text[: len(text)][-40:]!r}"
    elif job.state == "done":
        yield f"tokens: {where} has {len(ids)} and {len(text)} letters, the undisturbed run {len(expected.ids)}"


def _check_result(job: Job, reference: tuple[Expected, ...]) -> Iterator[str]:
    if job.result is None:
        if job.state == "done":
            yield "result: it is done and has none"
        return
    if len(job.result) != len(reference):
        yield f"result: it has {len(job.result)} choices of {len(reference)}"
        return
    for choice, (kept, expected) in enumerate(zip(job.result, reference, strict=True)):
        entries = job.channels[choice]
        if entries is not None and kept.ids != tuple(one for entry in entries for one in entry.ids):
            yield f"result: the tokens of choice {choice} are not those of its channel"
        if entries is not None and kept.text != "".join(entry.text for entry in entries):
            yield f"result: the text of choice {choice} is not that of its channel"
        if job.state == "done":
            yield from _check_end(kept, expected, choice)


def _check_end(kept: Choice, expected: Expected, choice: int) -> Iterator[str]:
    if kept.finish != expected.finish:
        yield f"result: choice {choice} ended by {kept.finish} and undisturbed by {expected.finish}"
    if not _are_near(kept.vector, expected.vector):
        yield f"result: the vector of choice {choice} is not that of the undisturbed run"


def _are_near(one: str | None, other: str | None) -> bool:
    """Return whether two vectors are equal within rounding: outside bfloat16 it depends on the batch."""
    if one is None or other is None:
        return one == other
    first, second = (array("f", bytes.fromhex(vector)) for vector in (one, other))
    return len(first) == len(second) and all(abs(a - b) < NEAR for a, b in zip(first, second, strict=True))


def _check_kept(job: Job, settings: Settings) -> Iterator[str]:
    """Each key expires within its documented time; a prompt is deleted at the end, except of failed jobs."""
    is_dead = job.state == "failed"
    result_ms = DEAD_KEPT_MS if is_dead else int(settings.get("result_ttl_ms") or 24 * HOUR_MS)
    channel_ms = result_ms if is_dead else int(settings.get("channel_ttl_ms") or HOUR_MS // 6)
    if not is_dead and not any(offset for offset, _ in job.published):
        channel_ms = min(channel_ms, EMPTY_CHANNEL_KEPT_MS)
    at_most = {"job": result_ms, "result": result_ms, "channel": channel_ms, "payload": DEAD_KEPT_MS}
    at_most["idem"] = int(settings.get("idempotency_ttl_ms") or 24 * HOUR_MS)
    for name, kept_ms in job.kept_ms.items():
        if not 0 < kept_ms <= at_most[name.split()[0]]:
            yield f"residue: its {name} is kept for {kept_ms} ms"
    if job.has_payload and not is_dead:
        yield "residue: its prompt is still there"
