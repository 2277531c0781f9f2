"""Jobs for tests of the worker: submitted by the contract's own calls, checked from outside.

The checker reads channels and results as any reader would, and compares with what the bare engine says to the same
request: that engine never saw Redis, another worker or a crash.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from secrets import token_hex
from typing import Any

from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import PromptRead, Request, TokenDelta
from sluice.protocol.calls import Accepted, NewJob, submit
from sluice.protocol.job_ids import job_id_of
from sluice.protocol.keys import QueueKeys
from sluice.protocol.limits import MAX_JOBS_PER_CALL
from sluice.protocol.redis.execution import run
from sluice.protocol.states import JobState
from sluice.protocol.tools import AUTO, REQUIRED
from sluice.protocol.wire import (
    ChannelEntry,
    JobId,
    JobOptions,
    JobResult,
    JobSpec,
    Message,
    Prompt,
    decode_entry,
    decode_result,
    encode_prompt,
    encode_spec,
)
from sluice.worker.config import load_config
from sluice.worker.model.load import load
from sluice.worker.model.sampling_defaults import NOTHING_STATED, resolve
from sluice.worker.model.translate import Translator
from tests.chaos.checker.rows import fields_of

KEYS = QueueKeys("default")
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A job to submit."""

    prompt: Prompt = "tell me"
    options: JobOptions = field(default_factory=JobOptions)
    seed: int = 7
    stream: bool = True
    awaited: bool = False
    priority: int = 0
    tenant: str = "t"
    deadline_ms: int | None = None
    not_before_ms: int | None = None
    model: str | None = None
    tools: tuple[str, ...] = ()
    """Functions that it must call. Its prompt becomes a message."""

    @property
    def spec(self) -> JobSpec:
        """What travels of it, besides the prompt."""
        choice = REQUIRED if self.tools else AUTO
        return JobSpec(
            options=self.options,
            stream=self.stream,
            awaited=self.awaited,
            model=self.model,
            tools=self.tools,
            tool_choice=choice,
        )

    @property
    def sent(self) -> Prompt:
        """The prompt as it travels."""
        is_chat = self.tools and isinstance(self.prompt, str)
        return (Message(role="user", content=str(self.prompt)),) if is_chat else self.prompt


def new_job_id(tenant: str, partition: int = 0) -> JobId:
    """A random one."""
    return job_id_of(partition, tenant, token_hex(12))


def new_job(ask: Ask, *, partition: int = 0) -> NewJob:
    """As a producer would encode it."""
    spec = encode_spec(ask.spec)
    payload = encode_prompt(ask.sent)
    return NewJob(
        id=new_job_id(ask.tenant, partition),
        spec=spec,
        payload=payload,
        seed=ask.seed,
        priority=ask.priority,
        prompt_tokens=len(ask.prompt) if ask.sent and isinstance(ask.sent[0], int) else None,
        prompt_bytes=len(ask.prompt) if isinstance(ask.prompt, str) else len(payload),
        max_tokens=ask.options.planned_tokens,
        choices=ask.options.n,
        digest=blake2b(spec + payload, digest_size=16).digest(),
        deadline_ms=ask.deadline_ms,
        not_before_ms=ask.not_before_ms,
    )


def submit_all(client: Any, asks: list[Ask], *, keys: QueueKeys = KEYS) -> list[JobId]:  # Any: a redis-py client
    """Submit, and insist on acceptance."""
    jobs = [new_job(ask, partition=keys.partition) for ask in asks]
    for at in range(0, len(jobs), MAX_JOBS_PER_CALL):
        for answer in run(client, submit(keys, jobs[at : at + MAX_JOBS_PER_CALL])):
            assert isinstance(answer, Accepted), answer
    return [job.id for job in jobs]


def expected_tokens(ask: Ask, config: NullModelConfig | None = None) -> list[tuple[list[int], str]]:
    """Return (tokens, text) of each choice, from an engine without faults."""
    deltas = _deltas(ask, config)
    return [
        (
            [one for delta in deltas if delta.choice == choice for one in delta.token_ids],
            "".join(delta.text for delta in deltas if delta.choice == choice),
        )
        for choice in range(ask.options.n)
    ]


def _deltas(ask: Ask, config: NullModelConfig | None) -> list[TokenDelta]:
    model = NullModel(config)
    engine = LLMEngine(model, NullTokenizer(), EngineConfig())
    resolved = resolve(ask.options, NOTHING_STATED, model.limits.eos_token_ids)
    encoded = _translator().encoded(ask.sent, ask.spec, now_ms=0)
    request = Request(
        id="r",
        prompt_token_ids=encoded.token_ids,
        sampling=encoded.sampling(ask.options, resolved, ask.seed),
        num_choices=ask.options.n,
        cache_salt=ask.tenant,
        grammar=encoded.grammar,
        embed=_translator().embed_of(ask.options),
    )
    engine.add([request])
    deltas: list[TokenDelta] = []
    while not engine.is_idle:
        deltas += engine.advance()
    return deltas


@cache
def _translator() -> Translator:
    """That of a null model which writes calls."""
    return load(load_config({}, flags={"model.path": "null", "model.tool_format": "hermes"})).translator


def check_prompt_read(result: JobResult, ask: Ask) -> None:
    """Check that a result has the vector, or the log-probabilities of the prompt's tokens, that its job asked for."""
    [read, *_] = [delta.prompt for delta in _deltas(ask, None) if delta.prompt is not None] or [PromptRead()]
    assert result.choices[0].vector == read.embedding
    kept = None if result.prompt is None else [one.chosen for one in result.prompt.logprobs or ()]
    assert kept == (None if read.logprobs is None else [one.chosen for one in read.logprobs])


def read_channel(client: Any, job_id: JobId, choice: int = 0, *, keys: QueueKeys = KEYS) -> list[ChannelEntry]:
    """Every entry, each checked to begin where the one before ended."""
    offset, entries = 0, list[ChannelEntry]()
    for entry_id, fields in client.xrange(keys.channel(job_id, choice)):
        entry = decode_entry(next(iter(fields.values())))
        assert entry.start == offset, f"{job_id}: an entry from {entry.start} after {offset} tokens"
        offset += len(entry.token_ids)
        assert entry_id.decode().split("-")[0] == str(offset)
        entries.append(entry)
    return entries


def num_on_channel(client: Any, job_id: JobId, choice: int = 0, *, keys: QueueKeys = KEYS) -> int:
    """Tokens on a channel now."""
    last = client.xrevrange(keys.channel(job_id, choice), count=1)
    return int(last[0][0].split(b"-")[0]) if last else 0


def field_of(client: Any, job_id: JobId, name: str, *, keys: QueueKeys = KEYS) -> str | None:
    """A field of the job's row as text; None if it is absent."""
    row = client.get(keys.job(job_id))
    return fields_of(job_id.split(".")[1], row).get(name) if row else None


def state_of(client: Any, job_id: JobId, *, keys: QueueKeys = KEYS) -> JobState | None:
    """The job's state."""
    state = field_of(client, job_id, "state", keys=keys)
    return JobState(state) if state else None


def wait_until(is_so: Callable[[], object], what: str, *, patience_s: float = PATIENCE_S) -> None:
    """Poll until something holds."""
    deadline_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited {patience_s:g} s in vain until {what}"
        time.sleep(0.002)


def wait_for_ends(client: Any, job_ids: list[JobId], *, keys: QueueKeys = KEYS, patience_s: float = PATIENCE_S) -> None:
    """Wait until every job has ended."""
    for job_id in job_ids:
        wait_until(
            lambda job_id=job_id: (state := state_of(client, job_id, keys=keys)) is not None and state.is_terminal,
            f"{job_id} has ended",
            patience_s=patience_s,
        )


def result_of(client: Any, job_id: JobId, *, keys: QueueKeys = KEYS) -> JobResult:
    """The result that is kept."""
    kept = client.get(keys.result(job_id))
    assert kept is not None, f"{job_id} has no result"
    return decode_result(kept)


def check_every_token_once(client: Any, asks: dict[JobId, Ask], *, keys: QueueKeys = KEYS) -> None:
    """Check that each job is done, and that channels and result equal the output of an engine without faults."""
    for job_id, ask in asks.items():
        assert state_of(client, job_id, keys=keys) is JobState.DONE, job_id
        result = result_of(client, job_id, keys=keys)
        for choice, (token_ids, text) in enumerate(expected_tokens(ask)):
            assert list(result.choices[choice].token_ids) == token_ids
            assert result.choices[choice].text == text
            entries = read_channel(client, job_id, choice, keys=keys)
            if not entries and not (ask.stream or ask.awaited) and ask.options.n == 1:
                continue
            assert [one for entry in entries for one in entry.token_ids] == token_ids, job_id
            assert "".join(entry.text for entry in entries) == text, job_id
            assert [entry.end is not None for entry in entries] == [False] * (len(entries) - 1) + [True]
        if ask.options.embed or ask.options.read_logprobs is not None:
            check_prompt_read(result, ask)


def check_nothing_is_left(client: Any, *, keys: QueueKeys = KEYS) -> None:
    """No lease, no waiting entry, no running job."""
    assert client.keys(keys.key("held", "*")) == []
    counters = client.hgetall(keys.key("counters"))
    for name in (b"waiting_jobs", b"waiting_tokens", b"waiting_bytes", b"running_jobs"):
        assert int(counters.get(name) or 0) == 0, counters
    assert client.keys(keys.key("lane", "*")) == []
