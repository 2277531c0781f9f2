"""A short soak: everything at once, with a fixed seed. `make soak` runs the long one, with a fresh seed."""

from pathlib import Path

import pytest

from tests.chaos.soak.run import MEAN_S, SoakSettings, is_empty, run
from tests.integration.jobs import KEYS
from tests.protocol.driving import Queue, ending, new_job
from tests.servers import RedisServer

SEED = 20_261


def means_s(hurry: float) -> dict[str, float]:
    """Mean seconds between two faults of a kind."""
    means_s = {name: max(0.5, mean_s / hurry) for name, mean_s in MEAN_S.items()}
    # They take seconds to start.
    return {**means_s, "kill -9 of a mover": 8.0, "kill -9 of a sender": 5.0}


def soak(folder: Path, *, jobs: int, kills: int, at_most_s: float, life_s: float, hurry: float) -> None:
    """Run a soak with short lives and many faults, and print its report, which pytest shows on failure."""
    settings = SoakSettings(
        seed=SEED,
        folder=folder,
        jobs=jobs,
        kills=kills,
        jobs_per_s=50,
        catalogue_size=60,
        num_workers=4,
        num_producers=2,
        num_movers=1,
        beat_s=life_s / 4,
        life_s=life_s,
        at_most_s=at_most_s,
        mean_s=means_s(hurry),
        drain_s=90,
    )
    report = run(settings, print)
    print(report.text())  # noqa: T201  # shown where it fails

    assert report.is_sound, report.checker
    assert report.acknowledged >= jobs / 2
    assert report.num_kills >= kills


class TestGivenATenantAtItsLimitOfTokens:
    def test_when_its_last_job_has_ended_then_a_drain_waits_until_it_may_start_another(
        self, valkey: RedisServer
    ) -> None:
        with valkey.client() as client:
            queue = Queue(client, KEYS)
            queue.stop_clock()
            queue.configure(tokens_per_minute={"few": 60})
            queue.submit(new_job("long", "few", max_tokens=600))
            worker = queue.worker("A")
            worker.advance(ending(worker.take(), 0, 100))
            at_its_end = is_empty(client)

            queue.pass_time(60_000)
            worker.beat()

            assert (at_its_end, is_empty(client)) == (False, True)


@pytest.mark.slow
@pytest.mark.long
def test_when_all_goes_wrong_for_a_while_then_an_outside_checker_finds_nothing(tmp_path: Path) -> None:
    soak(tmp_path, jobs=60, kills=3, at_most_s=60, life_s=1.0, hurry=20)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_when_it_goes_on_for_longer_then_an_outside_checker_finds_nothing(tmp_path: Path) -> None:
    # Fewer faults: a job whose workers die twice before its next token, while it runs alone, fails by design.
    soak(tmp_path, jobs=3000, kills=60, at_most_s=300, life_s=1.0, hurry=5)
