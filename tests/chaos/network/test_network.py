"""A hostile network for a few minutes: what is cut and worsened is drawn. `make test-network` runs all, for hours."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.network.clocks import COMPILER
from tests.chaos.network.clocks import HOW_TO_GET as HOW_TO_GET_COMPILER
from tests.chaos.network.faults import GROUPS, drawn
from tests.chaos.network.hosts import why_not
from tests.chaos.network.run import Run
from tests.postgres import HOW_TO_GET, has_postgres
from tests.servers import binary_of, how_to_get

SEED = 37
NUM_FAULTS = {"pairs": 12, "splits": 6, "bad links": 6, "clocks": 12}


def what_is_missing() -> str | None:
    """Why the suite cannot run here."""
    if binary_of("redis-7.0") is None:
        return how_to_get("redis-7.0")
    if not has_postgres():
        return HOW_TO_GET
    return HOW_TO_GET_COMPILER if COMPILER is None else why_not()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="sluice-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.long
@pytest.mark.timeout(1800)
class TestGivenHostsOfANetworkThatFails:
    """Producers at two levels, a gateway, three workers, a primary, a replica, three Sentinels, PostgreSQL."""

    @pytest.mark.parametrize("group", GROUPS)
    def test_when_links_fail_one_by_one_then_nothing_that_was_promised_is_lost(self, group: str, folder: Path) -> None:
        if (reason := what_is_missing()) is not None:
            pytest.skip(reason)
        faults = drawn(group, SEED, NUM_FAULTS[group])

        report = Run(group, SEED, faults, folder, print).run()

        print("\n".join(report.lines()))  # noqa: T201  # shown where it fails
        assert report.findings == []
        assert min(report.acknowledged.values()) > 0
        assert sum(row.num_dropped for row in report.rows) > 0 or group == "clocks"
