"""The comparison of services with their bare engines, and what counts as the next token after a kill."""

import pytest

from benchmarks.engine.peers import BARE, SERVICE, VLLM, VLLM_SERVICE, shares_of
from benchmarks.engine.recovery import Watch


class TestGivenServicesBesideTheirEngines:
    def test_when_ratios_are_printed_then_each_is_the_median_of_its_own_rounds(self) -> None:
        rounds = [
            {(SERVICE, 0): 90.0, (BARE, 0): 100.0, (VLLM_SERVICE, 0): 48.0, (VLLM, 0): 50.0},
            {(SERVICE, 0): 80.0, (BARE, 0): 80.0, (VLLM_SERVICE, 0): 50.0, (VLLM, 0): 50.0},
            {(SERVICE, 0): 95.0, (BARE, 0): 100.0, (VLLM_SERVICE, 0): 40.0, (VLLM, 0): 50.0},
        ]

        lines = shares_of(rounds, [0]).splitlines()

        assert lines == [f"{SERVICE} / {BARE}: 0.950", f"{VLLM_SERVICE} / {VLLM}: 0.960"]

    def test_when_there_is_no_service_over_a_peer_then_only_ours_is_printed(self) -> None:
        rounds = [{(SERVICE, 0): 90.0, (BARE, 0): 100.0, (VLLM, 0): 50.0}]

        assert shares_of(rounds, [0]) == f"{SERVICE} / {BARE}: 0.900"


class TestGivenAJobWhoseEngineIsKilled:
    @pytest.mark.parametrize(
        ("seen", "has_gone_on"),
        [
            ([(1, 9), (1, 10)], False),  # what the dead engine had said
            ([(1, 9), (2, 10), (2, 10)], False),
            ([(1, 9), (2, 10), (2, 11)], True),
        ],
        ids=["first attempt", "taken over", "speaks"],
    )
    def test_when_it_is_looked_at_then_only_a_token_of_a_new_attempt_ends_the_time(
        self, seen: list[tuple[int, int]], has_gone_on: bool
    ) -> None:
        watch = Watch(attempt=1)

        for attempt, tokens in seen:
            watch.look(attempt, tokens, since_s=0.0)

        assert (watch.took_s is not None) is has_gone_on
