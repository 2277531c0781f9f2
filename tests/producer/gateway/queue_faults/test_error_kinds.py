"""Which status and code the gateway has for each error of the queue's client."""

from collections.abc import Iterator

import pytest

from sluice.producer.errors import ProducerError
from sluice.producer.gateway.errors import KINDS

TREE = ("sluice.producer.errors", "sluice.producer.contract.errors", "sluice.producer.gateway.")
"""Modules with errors that reach the gateway's routes; those of commands do not."""


def _leaves(kind: type[ProducerError] = ProducerError) -> Iterator[type[ProducerError]]:
    subclasses = [one for one in kind.__subclasses__() if one.__module__.startswith(TREE)]
    if not subclasses:
        yield kind
    for one in subclasses:
        yield from _leaves(one)


class TestGivenEveryErrorOfTheClient:
    @pytest.mark.parametrize("kind", sorted(_leaves(), key=str))
    def test_when_a_route_raises_it_then_its_status_is_not_that_of_unknown_errors(
        self, kind: type[ProducerError]
    ) -> None:
        nearest = next(base for base in kind.__mro__ if base in KINDS)

        assert nearest is not ProducerError
