"""docs/reference/bounds.md, the commands and the metrics agree with the table of bounds."""

import click
import pytest

from sluice.gateway.settings import SETTINGS
from sluice.producer.cli.main import cli as producer
from sluice.protocol.bounds import BOUNDS, Bound
from sluice.worker.cli import main as worker
from tests.end_to_end.processes import ROOT
from tests.rules.commands import below
from tools.bounds_page import PAGE, page

OF_GATEWAY = {one.flag: one for one in SETTINGS}
SET = [bound for bound in BOUNDS if bound.set_by is not None]


def default_of(bound: Bound) -> object:
    """The default of the option or the setting that sets a bound."""
    assert bound.set_by is not None
    if bound.flag in OF_GATEWAY:
        return OF_GATEWAY[bound.flag].default
    program, *names, flag = bound.set_by.split()
    command: click.Command = {"producer": producer, "worker": worker}[program]
    for name in names:
        command = below(command)[name]
    [found] = [one for one in command.params if isinstance(one, click.Option) and flag in one.opts]
    return found.to_info_dict()["default"]


class TestGivenTheTableOfBounds:
    def test_when_a_bound_is_declared_then_the_page_has_it(self) -> None:
        written = PAGE.read_text()

        assert written == page(written), "run `python -m tools.bounds_page` to write the page"

    def test_when_names_are_compared_then_each_is_there_once(self) -> None:
        names = [bound.name for bound in BOUNDS]

        assert sorted(names) == sorted(set(names))

    @pytest.mark.parametrize("bound", SET, ids=[bound.name for bound in SET])
    def test_when_a_flag_sets_one_then_a_command_has_it_with_this_default(self, bound: Bound) -> None:
        default = default_of(bound)

        # Settings of a worker and of a queue have their default elsewhere.
        is_elsewhere = str(bound.set_by).startswith(("worker ", "producer queues set "))
        assert default == bound.default or (default is None and is_elsewhere)

    def test_when_one_has_a_metric_then_the_page_of_metrics_has_it(self) -> None:
        metrics = (ROOT / "docs/reference/metrics.md").read_text()

        named = {bound.metric.removeprefix("sluice_").removeprefix("gateway_") for bound in BOUNDS if bound.metric}

        assert [name for name in sorted(named) if name not in metrics] == []
