"""One client of ours as Django's sites and Celery's tasks use it."""

from pathlib import Path

import pytest

from tests.clients.environments import Client, python_client
from tests.end_to_end.processes import ROOT
from tests.servers import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.clients]


def ours(name: str) -> Client:
    """A program that imports this checkout."""
    return python_client(name).using("none", PYTHONPATH=str(ROOT))


class TestGivenADjangoSite:
    @pytest.mark.parametrize("way", ["wsgi", "asgi"])
    def test_when_async_and_sync_views_use_one_client_then_each_request_is_answered(
        self, valkey: RedisServer, way: str
    ) -> None:
        [said] = ours("django").run(way, valkey.url)

        assert said == {"right": 60}


class TestGivenCelerysSoftTimeLimit:
    def test_when_it_ends_calls_then_the_next_ones_get_their_own_answers(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        [said] = ours("celery").run(valkey.url, str(tmp_path))

        assert said == {"ended": 12, "answers": 36, "right": 36}
