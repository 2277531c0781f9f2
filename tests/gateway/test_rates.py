"""Limits of keys, counted on a real server."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from sluice.gateway.access import Caller
from sluice.gateway.api_keys.key import ApiKey
from sluice.gateway.errors import HttpError
from sluice.gateway.queues import Queues
from sluice.gateway.rates import KeyRates, callers_job
from sluice.gateway.settings import GatewaySettings
from sluice.producer import AsyncProducer, InvalidJob
from sluice.protocol import jobs
from sluice.protocol.jobs import CheckedJob
from sluice.protocol.limits import DEFAULT_MAX_TOKENS
from sluice.protocol.openai_format.requests import COMPLETIONS, read_request
from tests.servers import RedisServer


def key_of(key_id: str, *, rpm: int | None = None, tpm: int | None = None) -> ApiKey:
    """A key with limits."""
    return ApiKey(id=key_id, digest="", tenant="acme", created_ms=0, rpm=rpm, tpm=tpm)


async def charge(rates: KeyRates, key: ApiKey | None, **fields: Any) -> Mapping[str, str]:
    """Count one request of `job_of`."""
    return await rates.charge(key, job_of(**fields))


def job_of(**fields: Any) -> CheckedJob:
    """A job of 4 bytes and, without other fields, of 9 tokens of output: 10 tokens."""
    asked = read_request(COMPLETIONS, {"prompt": "four", "max_tokens": 9, **fields})
    return callers_job(Caller(), asked.prompt, asked.options)


async def refusal(rates: KeyRates, key: ApiKey, **fields: Any) -> HttpError:
    """The error of one request that is over a limit."""
    with pytest.raises(HttpError) as raised:
        await charge(rates, key, **fields)
    return raised.value


@pytest.fixture
async def client(valkey: RedisServer) -> AsyncIterator[AsyncProducer]:
    """The client of one gateway."""
    async with AsyncProducer(valkey.url) as made:
        yield made


@pytest.fixture
def rates(client: AsyncProducer) -> KeyRates:
    """What is tested."""
    return KeyRates(client, "default")


class TestGivenALimitOfRequests:
    async def test_when_it_is_reached_then_the_next_waits_for_its_share_of_the_minute(self, rates: KeyRates) -> None:
        key = key_of("a", rpm=3)

        left = [(await charge(rates, key))["x-ratelimit-remaining-requests"] for _ in range(3)]
        refused = await refusal(rates, key)

        assert left == ["2", "1", "0"]
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "20"
        assert "x-ratelimit-limit-tokens" not in refused.headers

    async def test_when_another_gateway_counts_then_both_count_the_same(
        self, rates: KeyRates, valkey: RedisServer
    ) -> None:
        key = key_of("b", rpm=2)

        async with AsyncProducer(valkey.url) as other:
            await charge(rates, key)
            await charge(KeyRates(other, "default"), key)

            assert (await refusal(rates, key)).status == 429
            assert (await refusal(KeyRates(other, "default"), key)).status == 429

    async def test_when_another_key_is_used_then_it_has_its_own(self, rates: KeyRates) -> None:
        await charge(rates, key_of("c", rpm=1))

        assert (await charge(rates, key_of("d", rpm=1)))["x-ratelimit-remaining-requests"] == "0"

    async def test_when_a_request_is_invalid_then_it_does_not_count(self, rates: KeyRates) -> None:
        key = key_of("e", rpm=1)

        with pytest.raises(InvalidJob):
            await charge(rates, key, temperature=-1)

        await charge(rates, key)


class TestGivenALimitOfTokens:
    async def test_when_prompt_and_output_are_counted_then_every_choice_counts(self, rates: KeyRates) -> None:
        key = key_of("f", tpm=1000)

        headers = await charge(rates, key, n=3)

        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert headers["x-ratelimit-remaining-tokens"] == str(1000 - (1 + 3 * 9))
        assert headers["x-ratelimit-reset-tokens"] == "1.68s"
        assert "x-ratelimit-limit-requests" not in headers

    async def test_when_a_refused_request_waits_as_told_then_it_is_accepted(self, rates: KeyRates) -> None:
        key = key_of("g", tpm=600)
        await charge(rates, key, max_tokens=599)
        began_s = time.monotonic()

        refused = await refusal(rates, key)
        while True:
            try:
                await charge(rates, key)
                break
            except HttpError:
                assert time.monotonic() - began_s < int(refused.headers["retry-after"]) + 1

        assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 10
        assert time.monotonic() - began_s > 0.8  # ten tokens at ten a second

    async def test_when_a_request_is_larger_than_the_limit_then_a_retry_is_not_advised(self, rates: KeyRates) -> None:
        refused = await refusal(rates, key_of("h", rpm=1, tpm=9))

        assert (refused.status, refused.code, refused.param) == (400, "request_too_large", "max_tokens")
        assert (await charge(rates, key_of("h", rpm=1, tpm=10)))["x-ratelimit-remaining-requests"] == "0"

    async def test_when_requests_are_refused_for_tokens_then_they_do_not_count(self, rates: KeyRates) -> None:
        key = key_of("i", rpm=2, tpm=15)
        await charge(rates, key)

        for _ in range(3):
            assert (await refusal(rates, key)).headers["x-ratelimit-remaining-requests"] == "1"


class TestGivenARequestThatIsGivenBack:
    async def test_when_the_next_is_counted_then_it_is_as_the_first(self, rates: KeyRates, valkey: RedisServer) -> None:
        key, job = key_of("m", rpm=3, tpm=1000), job_of()
        first = await rates.charge(key, job)

        back = await rates.give_back(key, job)

        assert remaining(back) == ("3", "1000")
        assert remaining(await rates.charge(key, job)) == remaining(first) == ("2", "990")

    async def test_when_the_count_is_gone_then_there_is_no_more_room_than_the_limit(self, rates: KeyRates) -> None:
        key, job = key_of("n", rpm=3, tpm=1000), job_of()

        assert remaining(await rates.give_back(key, job)) == ("3", "1000")
        assert remaining(await rates.charge(key, job)) == ("2", "990")

    async def test_when_the_server_is_away_then_nothing_is_raised(self) -> None:
        async with AsyncProducer("redis://127.0.0.1:1", patience_s=0.1) as client:
            assert await KeyRates(client, "default").give_back(key_of("o", rpm=3), job_of()) == {}


def remaining(headers: Mapping[str, str]) -> tuple[str, str]:
    """The requests and the tokens that are left."""
    return headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]


class TestGivenAKeyWithLimits:
    async def test_when_its_job_is_submitted_then_it_is_checked_and_encoded_once(
        self, rates: KeyRates, valkey: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts: Counter[str] = Counter()
        for name in ("encode_prompt", "encode_spec", "as_prompt", "JobSpec"):
            monkeypatch.setattr(jobs, name, counted(counts, name, getattr(jobs, name)))
        settings = GatewaySettings(redis_url=valkey.url, database_url="sqlite:////nowhere/history.db")
        caller = Caller(key_of("p", rpm=1, tpm=1000))

        async with Queues(settings) as queues:
            job = callers_job(caller, "four", {"max_tokens": 9})
            _, headers = await rates.submit(queues.first, caller, job)

        assert remaining(headers) == ("0", "990")
        # The digest covers the options without trace context and streaming, which is an encoding of its own.
        assert counts == {"encode_prompt": 1, "as_prompt": 1, "JobSpec": 1, "encode_spec": 2}

    async def test_when_no_length_is_stated_then_the_job_states_the_one_that_is_counted(self) -> None:
        limited, other = (callers_job(Caller(key_of("q", tpm=tpm)), "four", {}) for tpm in (1000, None))

        assert (limited.template.max_tokens, limited.template.is_length_stated) == (DEFAULT_MAX_TOKENS, True)
        assert not other.template.is_length_stated


def counted(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which counts its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:  # whatever the function takes
        counts[name] += 1
        return function(*args, **kwargs)

    return call


class TestGivenNoLimit:
    async def test_when_requests_are_counted_then_redis_has_no_count(
        self, rates: KeyRates, valkey: RedisServer
    ) -> None:
        assert await charge(rates, None) == await charge(rates, key_of("j")) == {}

        with valkey.client() as redis:
            assert redis.keys("*:rate:*") == []

    async def test_when_a_count_is_kept_then_it_is_gone_after_a_minute(
        self, rates: KeyRates, valkey: RedisServer
    ) -> None:
        await charge(rates, key_of("k", rpm=1))

        with valkey.client() as redis:
            assert 0 < redis.pttl("{default:0}:2:rate:k") <= 60_000
