"""A worker names its adapters in each heartbeat, so it serves a bounded number."""

import pytest

from sluice.protocol.limits import MAX_ADAPTERS
from sluice.worker.errors import ConfigError
from sluice.worker.serve.start import check_adapters

NAMES = [f"a{number}" for number in range(MAX_ADAPTERS + 1)]


class TestGivenMoreAdaptersThanAHeartbeatNames:
    def test_when_a_worker_starts_then_a_sentence_says_how_many_it_serves(self) -> None:
        check_adapters(NAMES[1:])

        with pytest.raises(ConfigError, match=rf"has {len(NAMES)} adapters; a worker serves at most {MAX_ADAPTERS}"):
            check_adapters(NAMES)
