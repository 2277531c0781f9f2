"""Rate limits of API keys: requests and tokens a minute, counted in Redis over all gateways.

The counts are stored under the Redis keys of the gateway's first queue; gateways with the same first queue share them.
Each count is a leaky bucket that holds at most the limit and drains in a minute. A request over a limit is refused and
costs nothing; one that adds no job is refunded. (Rate limits of tenants in the queue delay jobs instead.)
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import cast

from sluice.gateway.access import Caller
from sluice.gateway.api_keys.key import ApiKey
from sluice.gateway.errors import HttpError, bad_request
from sluice.gateway.queues import QueueClients
from sluice.gateway.refusals import refusal
from sluice.producer.aio import AsyncProducer
from sluice.producer.errors import ProducerError
from sluice.producer.operations.operation import Ask, Operation
from sluice.producer.operations.submission import Receipt
from sluice.protocol.bounds import REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE
from sluice.protocol.chains.chain import After
from sluice.protocol.jobs import CheckedJob, Options, PromptLike, checked_job
from sluice.protocol.keys import QueueKeys
from sluice.protocol.openai_format.requests import PROMPT
from sluice.protocol.scripts import register

WINDOW_MS = 60_000
RATE_HEADERS = tuple(
    f"x-ratelimit-{field}-{name}" for field in ("limit", "remaining", "reset") for name in ("requests", "tokens")
)

SCRIPT = """
-- KEYS[1]: hash of one key: requests and tokens in its buckets, and when (server's ms).
-- ARGV: for requests, then for tokens: most in the bucket (0: no limit), and what this request adds, or gives back;
-- then how many ms empty a full bucket.
-- Reply: 1 if there is room for both, else 0; then for both what the bucket holds now, and ms until there is room.
local now, window = redis.call('TIME'), tonumber(ARGV[5])
now = now[1] * 1000 + math.floor(now[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local passed = math.max(0, now - (tonumber(known[1]) or now))
local held, wait = {}, {0, 0}
for i = 1, 2 do
  local most, added = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  held[i] = math.max(0, (tonumber(known[i + 1]) or 0) - passed * most / window)
  if most > 0 and added > 0 then wait[i] = math.max(0, math.ceil((held[i] + added - most) * window / most)) end
end
local has_room = wait[1] == 0 and wait[2] == 0
if has_room then
  for i = 1, 2 do
    if tonumber(ARGV[2 * i - 1]) > 0 then held[i] = math.max(0, held[i] + tonumber(ARGV[2 * i])) end
  end
  redis.call('HSET', KEYS[1], 'at', string.format('%d', now),
    'requests', string.format('%.6f', held[1]), 'tokens', string.format('%.6f', held[2]))
  redis.call('PEXPIRE', KEYS[1], window)
end
return {has_room and 1 or 0, math.ceil(held[1]), math.ceil(held[2]), wait[1], wait[2]}
"""
SCRIPT_SHA1 = register(SCRIPT)


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit of a key, after a request."""

    name: str
    """`requests` or `tokens`."""

    most: int
    held: int
    wait_ms: int
    """Time until there is room for the request, in ms; 0: now."""

    @property
    def headers(self) -> dict[str, str]:
        """The rate limit headers of OpenAI's API."""
        empty_ms = ceil(self.held * WINDOW_MS / self.most)
        return {
            f"x-ratelimit-limit-{self.name}": str(self.most),
            f"x-ratelimit-remaining-{self.name}": str(max(0, self.most - self.held)),
            f"x-ratelimit-reset-{self.name}": f"{empty_ms}ms" if empty_ms < 1000 else f"{empty_ms / 1000:g}s",
        }


class KeyRates:
    """The rate limits of all keys.

    Args:
        producer: A client of the queue that stores the counts.
        queue: The name of that queue.
    """

    def __init__(self, producer: AsyncProducer, queue: str) -> None:
        self._producer, self._keys = producer, QueueKeys(queue)

    async def submit(
        self, queue: QueueClients, caller: Caller, job: CheckedJob, after: After | None = None
    ) -> tuple[Receipt, Mapping[str, str]]:
        """Submit a job of `callers_job`; return its receipt and the rate limit headers. A duplicate costs nothing.

        Raises:
            HttpError: as `charge`.
            ProducerError: as `QueueClients.submit`.
        """

        async def submitted() -> list[Receipt]:
            return [await queue.submit(job, after)]

        [receipt], rates = await self.submit_all(caller, [job], submitted)
        return receipt, rates

    async def submit_all(
        self, caller: Caller, jobs: Sequence[CheckedJob], submit: Callable[[], Awaitable[list[Receipt]]]
    ) -> tuple[list[Receipt], Mapping[str, str]]:
        """Submit the jobs of one request; return their receipts and the rate limit headers.

        It costs nothing if all are duplicates, or one is refused.

        Args:
            caller: Whose limits count.
            jobs: Those of `callers_job`.
            submit: Submits them, and raises a ProducerError if one is refused.

        Raises:
            HttpError: as `charge`.
            ProducerError: as `submit`.
        """
        rates = await self.charge(caller.key, *jobs)
        try:
            receipts = await submit()
        except ProducerError:
            await self.give_back(caller.key, *jobs)
            raise
        if all(receipt.is_duplicate for receipt in receipts):
            rates = await self.give_back(caller.key, *jobs) or rates
        return receipts, rates

    async def charge(self, key: ApiKey | None, *jobs: CheckedJob) -> Mapping[str, str]:
        """Count a request, with the tokens of its jobs, against the rate limits of its key.

        Returns:
            The rate limit headers.

        Raises:
            HttpError: 429, a limit is reached; 400, the request is larger than the limit.
            QueueUnreachable: the server does not answer.
        """
        if key is None or (key.rpm is None and key.tpm is None):
            return {}
        tokens = tokens_of(jobs)
        if key.tpm is not None and tokens > key.tpm:
            generates = any(job.template.max_tokens for job in jobs)
            asked = "prompt and max_tokens are" if generates else "the request has"
            raise bad_request(
                f"{asked} {tokens} tokens, and the API key's limit is {key.tpm} a minute",
                code="request_too_large",
                param="max_tokens" if generates else PROMPT,
            )
        has_room, buckets = await self._count(key, 1, tokens)
        headers = _headers(buckets)
        if not has_room:
            raise _limited(max(buckets, key=lambda bucket: bucket.wait_ms), headers)
        return headers

    async def give_back(self, key: ApiKey | None, *jobs: CheckedJob) -> Mapping[str, str]:
        """Undo `charge` for a request that added no job; return the rate limit headers.

        While the server is unreachable, the request stays counted, for up to a minute, and there are no headers.
        """
        if key is None or (key.rpm is None and key.tpm is None):
            return {}
        with suppress(ProducerError):
            return _headers((await self._count(key, -1, -tokens_of(jobs)))[1])
        return {}

    async def _count(self, key: ApiKey, requests: int, tokens: int) -> tuple[bool, list[LimitState]]:
        name = self._keys.key("rate", key.id)
        has_room, *counts = await self._producer.run(_script(name, key, requests, tokens))
        held, waits_ms = counts[:2], counts[2:]
        buckets = [
            LimitState(name, most, held[i], waits_ms[i])
            for i, (name, most) in enumerate((("requests", key.rpm), ("tokens", key.tpm)))
            if most is not None
        ]
        return bool(has_room), buckets


def _script(name: str, key: ApiKey, requests: int, tokens: int) -> Operation[list[int]]:
    call = ("EVALSHA", SCRIPT_SHA1, 1, name, key.rpm or 0, requests, key.tpm or 0, tokens, WINDOW_MS)
    # A refund is not repeated: twice, it would free the room of another request.
    [reply] = yield Ask((call,), is_repeatable=requests > 0)
    return cast("list[int]", reply)


def _headers(buckets: Iterable[LimitState]) -> Mapping[str, str]:
    return {name: value for bucket in buckets for name, value in bucket.headers.items()}


def check_runs(key: ApiKey | None, num_jobs: int, num_tokens: int) -> None:
    """Check that one run of each schedule of a tenant is within a key's limits: each runs at most once a minute.

    Raises:
        HttpError: 400, it is not.
    """
    for asked, most, what in ((num_jobs, key and key.rpm, "requests"), (num_tokens, key and key.tpm, "tokens")):
        if most is not None and asked > most:
            raise bad_request(
                f"one run of each schedule of the tenant has {asked} {what}; the API key's limit is {most} a minute",
                code="request_too_large",
                param="jobs",
            )


def callers_job(caller: Caller, prompt: PromptLike, options: Options) -> CheckedJob:
    """Check and encode a job of a caller's tenant, as `job_of_key`."""
    return job_of_key(caller.key, prompt, {**options, "tenant": caller.tenant})


def job_of_key(key: ApiKey | None, prompt: PromptLike, options: Options) -> CheckedJob:
    """Check and encode a job. If its key has a token limit, it states the `max_tokens` that count.

    Raises:
        InvalidJob: a value is wrong.
    """
    return checked_job(prompt, options, states_length=key is not None and key.tpm is not None)


def tokens_of(jobs: Iterable[CheckedJob]) -> int:
    """Return the tokens that jobs may use."""
    return sum(job.num_tokens for job in jobs)


def _limited(bucket: LimitState, headers: Mapping[str, str]) -> HttpError:
    wait_s = max(1, ceil(bucket.wait_ms / 1000))
    bound = REQUESTS_PER_MINUTE if bucket.name == "requests" else TOKENS_PER_MINUTE
    message = f"the API key's limit of {bucket.most} {bucket.name} a minute is reached; try again in {wait_s} s"
    return refusal(bound, message, retry_after_s=wait_s, headers=headers)
