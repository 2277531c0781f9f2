"""Any interleaving of script calls while tenants have limits, with the model of the scripts.

At no time does a tenant begin a job above its limits, and none is forgotten: when nothing of it runs and its bucket is
full, its waiting jobs start.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.examples import examples
from tests.properties import test_scripts_machine as machine
from tests.properties.test_scripts_machine import WORKERS, ScriptsMachine
from tests.servers import binary_of, how_to_get, redis_server

TENANTS = ["t", "u"]


class LimitsMachine(ScriptsMachine):
    """Producers, three workers and a clock, and someone who changes the limits of tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.max_running: dict[str, int | None] = dict.fromkeys(TENANTS)

    def teardown(self) -> None:
        try:
            self._check_that_none_is_forgotten()
        finally:
            super().teardown()

    @initialize(most=st.sampled_from([1, 2]))
    def limit_one(self, most: int) -> None:
        self.change_a_limit("t", most)

    @rule(tenant=st.sampled_from(TENANTS), most=st.sampled_from([None, 0, 1, 1, 2, 3]))
    def change_a_limit(self, tenant: str, most: int | None) -> None:
        self.max_running[tenant] = most
        self.queue.configure(max_running={tenant: most})

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.sampled_from([None, 1, 30, 1000]))
    def change_a_rate(self, tenant: str, tokens: int | None) -> None:
        self.queue.configure(tokens_per_minute={tenant: tokens})

    @rule(
        name=st.sampled_from(WORKERS), sequences=st.sampled_from([1, 2, 50]), is_empty=st.booleans(),
        over_class=st.sampled_from([None, None, 0, 5]),
    )  # fmt: skip
    def pull(self, name: str, sequences: int, is_empty: bool, over_class: int | None) -> None:
        before = self._running()
        super().pull(name, sequences, is_empty, over_class)
        for tenant, num_jobs in self._running().items():
            most = self.max_running[tenant]
            assert num_jobs <= before[tenant] or most is None or num_jobs <= most, (tenant, num_jobs, most)

    def _running(self) -> Counter[str]:
        """Jobs of each tenant that workers hold."""
        return Counter(job_id.split(".")[1] for job_id in self.queue.leases())

    def _check_that_none_is_forgotten(self) -> None:
        """Every job that may start does so, once the dead are buried and time has passed."""
        self.queue.resume()
        for tenant, most in self.max_running.items():
            self.queue.configure(max_running={tenant: None if most == 0 else most}, tokens_per_minute={tenant: 60})
        last = self.queue.worker("last")
        for _ in range(200):
            self.queue.pass_time(60_000)
            last.beat()
            jobs = [*last.pull(is_empty=True).jobs, *last.pull(is_empty=True).jobs]
            last.advance(*[
                machine.ending(job, job.published[choice], choice=choice)
                for job in jobs
                for choice in range(job.choices)
                if not job.ended[choice]
            ])  # fmt: skip
            if not self._num_left():
                return
        assert not self._num_left()

    def _num_left(self) -> int:
        """Jobs that have not ended."""
        views = self.queue.views(sorted(self.jobs))
        return sum(view is not None and not view.state.is_terminal for view in views)


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    if binary_of("valkey") is None:
        pytest.skip(how_to_get("valkey"))
    with redis_server("valkey") as server:
        machine.SERVER.append(server)
        yield
        machine.SERVER.clear()


TestLimitsMachine = LimitsMachine.TestCase
TestLimitsMachine.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
