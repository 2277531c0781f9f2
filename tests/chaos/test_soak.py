"""A short soak: everything at once, with a fresh seed that is printed. `make soak` runs the long one."""

import secrets
from pathlib import Path

import pytest

from tests.chaos.soak.run import MEAN_S, SoakSettings, run

HASTY = {name: max(0.5, mean_s / 20) for name, mean_s in MEAN_S.items()}


def soak(folder: Path, *, jobs: int, kills: int, at_most_s: float) -> None:
    """Run one with short lives and many harms, and show what it was like; pytest prints it where it fails."""
    settings = SoakSettings(
        seed=secrets.randbelow(10**6),
        folder=folder,
        jobs=jobs,
        kills=kills,
        jobs_per_s=50,
        catalogue_size=60,
        num_workers=4,
        num_producers=2,
        beat_s=0.1,
        life_s=0.4,
        at_most_s=at_most_s,
        mean_s=HASTY,
        drain_s=30,
    )
    report = run(settings, print)
    print(report.text())  # noqa: T201  # shown where it fails

    assert report.is_sound, report.checker
    assert report.acknowledged >= jobs / 2
    assert report.num_kills >= kills


@pytest.mark.slow
def test_when_all_goes_wrong_for_a_while_then_an_outside_checker_finds_nothing(tmp_path: Path) -> None:
    soak(tmp_path, jobs=200, kills=8, at_most_s=60)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_when_it_goes_on_for_longer_then_an_outside_checker_finds_nothing(tmp_path: Path) -> None:
    soak(tmp_path, jobs=3000, kills=60, at_most_s=300)
