"""What the batches of one tenant can do to those of others."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from sluice.gateway.batches import taken
from sluice.gateway.batches.store import BatchStore, Due, TooManyBatches
from sluice.gateway.batches.taken import Workshop
from sluice.gateway.batches.task import advance
from sluice.gateway.batches.turns import Turns
from sluice.gateway.tables.database import Database
from sluice.worker.recorder.migrate import migrate
from tests.gateway.batches.processes import numbered
from tests.gateway.batches.steps import added, current
from tests.histories import opened_history
from tests.postgres import HOW_TO_GET, has_postgres, postgres_server
from tests.servers import RedisServer


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def history_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A migrated history on each database in turn; each test has other queues and tenants."""
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path_factory.mktemp('history') / 'history.db'}"
        if request.param == "postgres":
            if not has_postgres():
                pytest.skip(HOW_TO_GET)
            server = stack.enter_context(postgres_server())
            url = server.url(server.create_database())
        with opened_history(url) as engine:
            migrate(engine)
        yield url


@pytest.fixture
def workshop(history_url: str, valkey: RedisServer, tmp_path: Path) -> Generator[Workshop]:
    """What tasks work with, on each database."""
    with Workshop.open(valkey.url, history_url, (tmp_path / "files").as_uri()) as made:
        yield made


class TestGivenLargeBadFilesOfOneTenant:
    """Each takes many slices to check."""

    def test_when_another_tenant_has_a_batch_then_it_waits_for_one_slice(
        self, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(taken, "SLICE_S", 0.0)
        monkeypatch.setattr(taken, "WORK_PER_READ", 0.0)
        large = [added(workshop, numbered(100) + b"{}", tenant="mallory", queue="turns") for _ in range(4)]
        turns = Turns()
        self.advance(workshop, turns)
        small = added(workshop, numbered(1), queue="turns")

        monkeypatch.setattr(taken, "SLICE_S", 5.0)
        self.advance(workshop, turns)

        assert current(workshop, small).status == "in_progress"
        assert {found.status for batch in large if (found := workshop.batches.get(batch.id, "mallory"))} == {
            "validating"
        }

    def advance(self, workshop: Workshop, turns: Turns) -> None:
        """Take a turn."""
        due = turns.next(workshop.batches.due("turns"))
        assert due is not None
        advance(workshop, due.id, due.epoch)


class TestGivenTurnsOfTenants:
    def test_when_one_has_many_batches_then_others_have_as_many_turns(self, workshop: Workshop) -> None:
        for tenant in ("mallory", "mallory", "mallory", "acme", "zoe"):
            added(workshop, numbered(1), tenant=tenant, queue="many")

        due = workshop.batches.due("many")
        turns = Turns()
        taken = [found.tenant for _ in range(6) if (found := turns.next(due)) is not None]

        assert sorted(one.tenant for one in due) == ["acme", "mallory", "zoe"]
        assert sorted(taken[:3]) == sorted(taken[3:]) == ["acme", "mallory", "zoe"]

    def test_when_a_tenant_comes_new_then_it_is_next(self) -> None:
        turns = Turns()
        known = [Due("1", 1, "a"), Due("2", 1, "b")]
        turns.next(known)
        turns.next(known)

        assert turns.next([*known, Due("3", 1, "new")]) == Due("3", 1, "new")
        assert turns.next([]) is None


class TestGivenABoundOfOpenBatches:
    MOST = 5

    def test_when_gateways_create_more_at_once_then_exactly_so_many_are_open(
        self, workshop: Workshop, history_url: str
    ) -> None:
        first = added(workshop, numbered(1), tenant="at-once")
        numbers = count()

        def create(store: BatchStore) -> bool:
            try:
                return store.add(replace(first, id=f"batch_{next(numbers):024d}"), max_open=self.MOST)
            except TooManyBatches:
                return False

        with Database(history_url) as one, Database(history_url) as other, ThreadPoolExecutor(8) as threads:
            stores = [BatchStore(one), BatchStore(other)] * 8
            created = list(threads.map(create, stores))

        assert sum(created) == self.MOST - 1

    def test_when_one_is_over_or_it_is_another_tenants_then_there_is_room(self, workshop: Workshop) -> None:
        batch = added(workshop, numbered(1), tenant="at-bound")
        with pytest.raises(TooManyBatches):
            workshop.batches.add(batch, max_open=1)
        added(workshop, numbered(1), tenant="other")

        workshop.batches.move(batch, "failed")

        assert workshop.batches.add(replace(batch, id="batch_ffffffffffffffffffffffff"), max_open=1)
