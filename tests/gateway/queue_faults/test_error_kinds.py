"""Which status and code the gateway has for each error of the queue's client."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import pytest

from sluice import gateway, history, producer, protocol
from sluice.gateway.errors import KINDS
from sluice.producer.errors import ProducerError

COMMANDS = tuple(
    f"sluice.{name}"
    for name in ("producer.cli.", "producer.bulk.", "producer.__main__", "gateway.cli.", "protocol.bulk_files.")
)
"""Modules whose errors no route raises."""


for room in (gateway, history, producer, protocol):
    for module in walk_packages(room.__path__, f"{room.__name__}."):
        if not module.name.startswith(COMMANDS):
            import_module(module.name)  # its errors are subclasses only then


def _leaves(kind: type[ProducerError] = ProducerError) -> Iterator[type[ProducerError]]:
    subclasses = [one for one in kind.__subclasses__() if not one.__module__.startswith(COMMANDS)]
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
