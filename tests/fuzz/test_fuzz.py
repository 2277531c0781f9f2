"""A short fuzz of every decoder with a fresh seed, which a failure prints; `make fuzz` is the long one."""

import random

import pytest

from tests.fuzz.__main__ import fuzz, input_of, problem_with, shrunk
from tests.fuzz.targets import TARGETS, Target

SHORT = 400


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_in_a_decoder_gives_a_value_or_says_what_is_wrong(name: str) -> None:
    seed = f"{random.SystemRandom().getrandbits(32):08x}"

    assert [str(failure) for failure in fuzz(name, seed, range(SHORT))] == []


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("cursor", b"9" * 5000),
        ("options", b'{"tenant": []}'),
        ("options", b'{"job_id": 1}'),
        ("options", b'{"metadata": 9}'),
        ("options", b'{"priority": null}'),
        ("options", b'{"idempotency_key": "\\ud800"}'),
    ],
)
def test_what_once_was_bad_stays_well(name: str, data: bytes) -> None:
    assert problem_with(TARGETS[name], data) is None


class TestGivenATargetWithAFlaw:
    def _flawed(self, data: bytes) -> None:
        if b"\xff" in data and len(data) > 3:
            raise KeyError(data)

    def test_when_an_input_meets_it_then_a_small_one_with_the_same_flaw_is_found(self) -> None:
        target = Target(lambda random_: random_.randbytes(500), self._flawed, (ValueError,))

        small = shrunk(target, b"a" * 300 + b"\xff" + b"b" * 300)

        assert b"\xff" in small
        assert len(small) == 4

    def test_when_the_same_case_is_made_again_then_it_is_the_same_input(self) -> None:
        assert input_of("events", "seed", 5) == input_of("events", "seed", 5)
        assert len({input_of("events", "seed", number) for number in range(50)}) > 40
