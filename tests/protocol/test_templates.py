"""Options of jobs: checked once for the many jobs that have the same."""

from datetime import UTC, datetime

import pytest

from sluice.protocol.jobs import Options, template
from sluice.protocol.limits import DEFAULT_MAX_TOKENS
from sluice.protocol.wire import decode_spec


def request_options(deadline_s: int) -> Options:
    """Options as the gateway has them for each request."""
    return {
        "max_tokens": 5,
        "tenant": "acme",
        "idempotency_key": None,
        "deadline": datetime.fromtimestamp(deadline_s, UTC),
        "traceparent": None,
    }


class TestGivenTheOptionsOfAnEarlierJob:
    def test_when_only_its_own_are_different_then_the_others_are_not_checked_again(self) -> None:
        first, second = template(request_options(1)), template({**request_options(2), "idempotency_key": "k"})

        assert first.spec is second.spec
        assert (first.deadline_ms, second.deadline_ms) == (1000, 2000)
        assert (first.idempotency_key, second.idempotency_key) == (None, "k")

    @pytest.mark.parametrize("own", [{"seed": 1}, {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}])
    def test_when_it_has_a_seed_or_a_trace_then_they_are_its_own(self, own: Options) -> None:
        plain, other = template(request_options(1)), template({**request_options(1), **own})

        assert (other.seed, decode_spec(other.spec).traceparent) == (own.get("seed"), own.get("traceparent"))
        assert (plain.seed, decode_spec(plain.spec).traceparent) == (None, None)


class TestGivenJobsThatMustStateTheirLength:
    @pytest.mark.parametrize(
        ("options", "stated"),
        [({}, DEFAULT_MAX_TOKENS), ({"min_tokens": 300}, 300), ({"max_tokens": 7}, 7), ({"embed": True}, None)],
    )
    def test_when_they_are_checked_then_their_options_have_what_is_planned(
        self, options: Options, stated: int | None
    ) -> None:
        checked = template(options, states_length=True)

        assert decode_spec(checked.spec).options.max_tokens == stated
        assert checked.is_length_stated
