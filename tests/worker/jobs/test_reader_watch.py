"""Whether anybody reads: what the counts of reads show, and for how long."""

import pytest

from sluice.worker.jobs.reader_watch import COUNT_EVERY_S, KEPT_S, UNREAD_COUNT_EVERY_S, ReaderWatch

LATER_S = KEPT_S + 0.1


@pytest.fixture
def watch() -> ReaderWatch:
    """It has counted once, at time 0."""
    watch = ReaderWatch()
    watch.note("first", 7, 0.0)
    return watch


class TestGivenNoCountYet:
    def test_when_asked_then_readers_may_be_there_and_it_counts(self) -> None:
        assert ReaderWatch().are_there(1000.0)
        assert ReaderWatch().is_due(0.0)


class TestGivenACount:
    def test_when_it_does_not_rise_then_nobody_is_there_after_a_while(self, watch: ReaderWatch) -> None:
        watch.note("first", 7, 0.5)

        assert watch.are_there(0.9 * KEPT_S)
        assert not watch.are_there(LATER_S)

    def test_when_it_rises_after_that_then_readers_are_there_again(self, watch: ReaderWatch) -> None:
        watch.note("first", 8, LATER_S)

        assert watch.are_there(LATER_S)
        assert not watch.are_there(2 * LATER_S)

    def test_when_the_server_restarts_then_its_readers_are_expected_back(self, watch: ReaderWatch) -> None:
        watch.note("first", 0, LATER_S)

        assert watch.are_there(LATER_S)

    def test_when_a_server_does_not_tell_then_readers_are_assumed(self, watch: ReaderWatch) -> None:
        for at_s in (LATER_S, 2 * LATER_S):
            watch.note("first", None, at_s)
            assert watch.are_there(at_s)

    def test_when_one_partition_is_read_then_readers_are_there(self, watch: ReaderWatch) -> None:
        watch.note("second", 3, 0.0)
        watch.note("first", 7, LATER_S)
        assert not watch.are_there(LATER_S)

        watch.note("second", 4, LATER_S)

        assert watch.are_there(LATER_S)

    def test_when_readers_are_there_then_it_counts_less_often(self, watch: ReaderWatch) -> None:
        assert not watch.is_due(0.9 * COUNT_EVERY_S)
        assert watch.is_due(COUNT_EVERY_S)

        watch.note("first", 7, LATER_S)

        assert not watch.is_due(LATER_S + 0.9 * UNREAD_COUNT_EVERY_S)
        assert watch.is_due(LATER_S + 1.1 * UNREAD_COUNT_EVERY_S)
