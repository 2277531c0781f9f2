"""The gateway's benchmark pairs and counts what it says, at toy sizes."""

import pytest

from benchmarks.gateway.figures import first_token, silent, tokens

pytestmark = pytest.mark.slow


class TestGivenAPacedWorker:
    @pytest.mark.long
    def test_when_requests_are_followed_twice_then_each_is_a_pair(self) -> None:
        found = first_token(2, 6, step_s=0.005)

        assert len(found.added_ms) + found.num_late == len(found.ttft_ms) == 6
        assert all(-100 < ms < 20_000 for ms in found.added_ms)

    @pytest.mark.long
    def test_when_tokens_are_streamed_then_events_and_processor_time_are_counted(self) -> None:
        found = tokens(2, 20, step_s=0.005, round_s="0")

        # The first token, the end and what marks the end of the stream are events too.
        assert found.num_tokens == 40
        assert 2 < found.num_events <= 40 + 2 * 2
        assert found.gateway_s > 0


class TestGivenNoWorker:
    def test_when_streams_are_held_open_then_their_memory_is_read(self) -> None:
        found = silent(10, settle_s=0, watch_s=0.1)

        assert 0 < found.before_mib <= found.mib < 1000
