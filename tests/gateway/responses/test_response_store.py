"""The table of responses, on both databases."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

import pytest
import sqlalchemy as sa

from sluice.gateway.openai.responses import ResponseEnd, ResponseInfo
from sluice.gateway.responses.store import LOST, ResponseStore, StoredResponse
from sluice.gateway.tables.database import Database
from sluice.history.tables import responses
from sluice.protocol.clock import wall_ms
from sluice.protocol.wire import JobId

NUL = "a\0b\N{LINE SEPARATOR}\N{SNOWMAN}"


def response(tenant: str = "acme", **fields: str) -> StoredResponse:
    """A response that is not in the table."""
    info = ResponseInfo(
        job_id=JobId(f"0.{tenant}.{uuid4().hex}"), created_ms=wall_ms(), model="null", options={"instructions": NUL}
    )
    made = StoredResponse(
        info=info,
        tenant=tenant,
        queue="default",
        expires_ms=wall_ms() + 60_000,
        input=({"role": "user", "content": NUL},),
        digest="d",
    )
    return replace(made, **fields) if fields else made


def continuing(before: StoredResponse, tenant: str = "acme") -> StoredResponse:
    """A response that continues another."""
    made = response(tenant)
    return replace(made, info=replace(made.info, previous_id=before.info.id), depth=before.depth + 1)


@pytest.fixture
def store(history_url: str) -> Generator[ResponseStore]:
    """The table, which other tests use too."""
    with Database(history_url) as database:
        yield ResponseStore(database)


class TestGivenAResponse:
    def test_when_it_is_read_then_it_is_as_written_whatever_its_characters(self, store: ResponseStore) -> None:
        new, end = response(), ResponseEnd(status="completed", text=NUL, usage={"total_tokens": 3})

        store.add(new)
        store.finish({new.info.id: end})

        assert store.get(new.info.id, "acme") == replace(new, input=(), end=end)
        assert store.input_of(new.info.id, "acme") == [{"role": "user", "content": NUL}]

    def test_when_it_has_ended_then_its_first_end_stays(self, store: ResponseStore) -> None:
        new, end = response(), ResponseEnd(status="completed", text="first")
        store.add(new)

        store.finish({new.info.id: end})
        store.finish({new.info.id: ResponseEnd(status="cancelled")})

        found = store.get(new.info.id, "acme")
        assert found is not None
        assert found.end == end

    @pytest.mark.parametrize("name", ["resp_unknown", "", "x", "resp_\0", "resp_'; --", "resp_" + "a" * 65, "resp_é"])
    def test_when_another_is_asked_for_then_there_is_none(self, store: ResponseStore, name: str) -> None:
        assert store.get(name, "acme") is None
        assert store.input_of(name, "acme") is None
        assert store.conversation(name, "acme") == []

    def test_when_another_tenant_asks_then_there_is_none(self, store: ResponseStore) -> None:
        new = response()
        store.add(new)

        assert store.get(new.info.id, "initech") is None
        assert store.input_of(new.info.id, "initech") is None
        assert store.conversation(new.info.id, "initech") == []

    def test_when_its_time_is_over_then_it_is_gone(self, store: ResponseStore) -> None:
        new = replace(response(), expires_ms=wall_ms() - 1)
        store.add(new)

        assert store.get(new.info.id, "acme") is None
        assert store.delete_expired(9) >= 1


class TestGivenAConversation:
    def test_when_it_is_read_then_it_is_in_order_with_its_input(self, store: ResponseStore) -> None:
        first = response()
        second = continuing(first)
        third = continuing(second)
        for one in (third, first, second, continuing(first)):
            store.add(one)

        found = store.conversation(third.info.id, "acme")

        assert [one.info.id for one in found] == [one.info.id for one in (first, second, third)]
        assert [item["content"] for one in found for item in one.input] == [NUL] * 3


class TestGivenAnIdempotencyKey:
    def test_when_many_add_at_once_then_one_does_and_the_others_get_its_row(self, store: ResponseStore) -> None:
        key = uuid4().hex
        news = [replace(response(), idempotency_key=key) for _ in range(6)]

        with ThreadPoolExecutor(6) as pool:
            known = list(pool.map(store.add, news))

        [winner] = [new for new, found in zip(news, known, strict=True) if found is None]
        assert {found.info.id for found in known if found is not None} == {winner.info.id}

    def test_when_its_job_is_refused_then_the_row_goes_unless_another_request_has_it(
        self, store: ResponseStore
    ) -> None:
        alone, shared = (replace(response(), idempotency_key=uuid4().hex) for _ in range(2))
        store.add(alone)
        store.add(shared)
        known = store.add(replace(response(), idempotency_key=shared.idempotency_key))

        store.withdraw(alone)
        store.withdraw(shared)

        assert known is not None
        assert store.get(alone.info.id, "acme") is None
        assert store.get(shared.info.id, "acme") == replace(known, input=())

    def test_when_its_response_has_expired_then_a_new_one_takes_its_place(self, store: ResponseStore) -> None:
        old = replace(response(), idempotency_key=uuid4().hex, expires_ms=wall_ms() - 1)
        other, new = (replace(response(tenant), idempotency_key=old.idempotency_key) for tenant in ("initech", "acme"))
        for one in (old, other):
            store.add(one)

        found = store.add(new)

        assert found is None
        assert store.get(new.info.id, "acme") is not None
        assert store.get(other.info.id, "initech") is not None

    def test_when_a_request_has_none_then_it_deletes_no_expired_row(
        self, store: ResponseStore, history_url: str
    ) -> None:
        old = replace(response(), expires_ms=wall_ms() - 1)
        store.add(old)

        store.add(response())

        with Database(history_url) as database, database.reading() as connection:
            kept = connection.execute(sa.select(responses.c.id).where(responses.c.id == old.info.id)).scalars().all()
        assert kept == [old.info.id]

    def test_when_another_tenant_has_the_same_then_both_have_a_row(self, store: ResponseStore) -> None:
        key = uuid4().hex

        found = [store.add(replace(response(tenant), idempotency_key=key)) for tenant in ("acme", "initech")]

        assert found == [None, None]


class TestGivenOpenResponses:
    def test_when_they_are_paged_then_each_comes_once_and_ended_ones_do_not(self, store: ResponseStore) -> None:
        ended, *news = [response() for _ in range(5)]
        for one in (ended, *news):
            store.add(one)
        store.finish({ended.info.id: ResponseEnd(status="completed")})

        seen: list[str] = []
        after = ""
        while page := store.open_after("default", after, 2):
            seen += [one.info.id for one in page]
            after = seen[-1]

        assert seen == sorted(set(seen))
        assert {one.info.id for one in news} <= set(seen)
        assert ended.info.id not in seen

    def test_when_a_lost_one_is_opened_again_then_it_is_among_them(self, store: ResponseStore) -> None:
        lost, ended = response(), response()
        end = ResponseEnd(status="completed")
        store.add(lost)
        store.add(ended)
        store.finish({lost.info.id: LOST, ended.info.id: end})

        store.reopen(lost.info.id)
        store.reopen(ended.info.id)

        assert [one.end for one in store.conversation(lost.info.id, "acme")] == [None]
        assert [one.end for one in store.conversation(ended.info.id, "acme")] == [end]


class TestGivenAWriterThatTakesItsTime:
    def test_when_the_table_is_read_then_nothing_waits_for_it(self, store: ResponseStore, history_url: str) -> None:
        new = response()
        store.add(new)

        with Database(history_url) as writing, writing.transaction():
            found = store.get(new.info.id, "acme")
            messages = store.input_of(new.info.id, "acme")
            conversation = store.conversation(new.info.id, "acme")
            is_listed = new.info.id in [one.info.id for one in store.open_after("default", "", 1000)]
            recorded = store.recorded("default", [new.info.job_id])

        assert found == replace(new, input=())
        assert (messages, len(conversation), is_listed, recorded) == ([*new.input], 1, True, {})
