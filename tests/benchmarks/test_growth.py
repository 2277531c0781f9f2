"""The benchmark of growth: its fit, and one of its parts at toy size."""

from pathlib import Path

import pytest

from benchmarks.growth.curves import Curve, read, save
from benchmarks.growth.queue import by_queued_jobs, by_streams


def curve(power: float, *, expected: float) -> Curve:
    """A curve of cost = 3 size ** power."""
    points = [(size, 3 * size**power) for size in (10, 100, 1000, 10_000)]
    return Curve(name="n", size="s", cost="c", expected=expected, points=points)


class TestGivenACurve:
    @pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
    def test_when_cost_is_a_power_of_size_then_the_fit_finds_it(self, power: float) -> None:
        assert curve(power, expected=power).exponent == pytest.approx(power)

    def test_when_it_grows_faster_than_it_may_then_it_says_so(self) -> None:
        assert curve(1.0, expected=1.0).is_as_expected
        assert not curve(1.2, expected=1.0).is_as_expected
        assert curve(-0.5, expected=0.0).is_as_expected


class TestGivenAServer:
    def test_when_jobs_wait_then_each_script_costs_the_server_something(self) -> None:
        curves = by_queued_jobs((10, 2000))

        assert [one.name for one in curves] == ["submit", "pull", "one token and end"]
        assert all(0.1 < cost < 100_000 for one in curves for _, cost in one.points)

    def test_when_jobs_run_then_a_token_of_many_costs_less_than_one_alone(self) -> None:
        (published,) = by_streams((1, 64))

        (_, alone), (_, together) = published.points
        assert together < alone


class TestGivenMeasuredCurves:
    def test_when_they_are_saved_then_they_can_be_read_and_drawn_again(self, tmp_path: Path) -> None:
        curves = [curve(0.5, expected=1.0)]
        save(curves, tmp_path)

        read_curves = read(tmp_path / "growth.json")
        save(read_curves, tmp_path / "again")

        assert read_curves[0].exponent == pytest.approx(0.5)
        assert (tmp_path / "again" / "growth.svg").read_bytes() == (tmp_path / "growth.svg").read_bytes()

    @pytest.mark.long
    def test_when_they_are_drawn_then_the_file_is_small_and_its_text_is_text(self, tmp_path: Path) -> None:
        save([curve(0.5, expected=1.0)] * 20, tmp_path)

        svg = (tmp_path / "growth.svg").read_text("utf-8")

        assert svg.count("\n") < 400
        assert svg.count(">measured: exponent 0.50</text>") == 20
