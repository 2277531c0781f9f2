"""Which queue a request goes to: heartbeats of workers on a real server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from uuid import uuid4

import pytest

from sluice.gateway.errors import HttpError
from sluice.gateway.queues import Queues
from sluice.gateway.settings import GatewaySettings, ServedQueue
from sluice.producer import Producer
from sluice.producer.errors import InvalidSetting
from sluice.protocol import calls
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from tests.gateway.gateway_process import gateway_process
from tests.servers import RedisServer, redis_server

Found = TypeVar("Found")


class Site:
    """Two queues of one server, and the gateway's view of them."""

    def __init__(self, server: RedisServer) -> None:
        self.server, self.chat, self.bulk = server, f"chat-{uuid4().hex}", f"bulk-{uuid4().hex}"
        self.partitions: dict[str, int] = {}
        self.look_every_s = 0.0

    def start(self, queue: str, model: str, **about: str) -> None:
        """Send the heartbeat of a worker."""
        about = {"model": model, **about}
        name = "".join(about.values())
        beat = calls.Beat(incarnation=name, held=(), processed_pull=0, expiry_ms=60_000, about=about)
        self._run(calls.beat(QueueKeys(queue, 0), beat))

    def stop(self, queue: str, model: str) -> None:
        """Deregister a worker."""
        self._run(calls.give_back(QueueKeys(queue, 0), model, [], deregister=True))

    def ask(self, question: Callable[[Queues], Awaitable[Found]], *, only_chat: bool = False, **models: str) -> Found:
        """Ask a gateway that serves both queues, or only one."""
        names = (self.chat,) if only_chat else (self.chat, self.bulk)
        settings = GatewaySettings(
            redis_url=self.server.url,
            database_url="sqlite:////nowhere/history.db",
            queues=tuple(ServedQueue(name, self.partitions.get(name)) for name in names),
            model_queues=tuple(models.items()),
        )

        async def ask() -> Found:
            async with Queues(settings, look_every_s=self.look_every_s) as queues:
                return await question(queues)

        return asyncio.run(ask())

    def queue_of(self, model: str | None, *, only_chat: bool = False, **models: str) -> str:
        """The name of the queue that serves a model."""

        async def name(queues: Queues) -> str:
            return (await queues.of_model(model)).name

        return self.ask(name, only_chat=only_chat, **models)

    def _run(self, call: calls.Call[Found]) -> Found:
        with self.server.client() as client:
            return run(client, call)


@pytest.fixture
def site(queue_server: RedisServer) -> Site:
    """Two queues, with a worker each."""
    made = Site(queue_server)
    made.start(made.chat, "small")
    made.start(made.bulk, "large")
    return made


@pytest.fixture
def wrong(site: Site) -> Site:
    """The same; the workers of the second state 2 partitions, and the gateway is told 3."""
    with Producer(site.server.url, queue=site.bulk) as owner:
        owner.configure(calls.QueueSettings(partitions=2))
    site.partitions[site.bulk] = 3
    return site


class TestGivenTwoQueuesWithAModelEach:
    """Both have a living worker."""

    @pytest.mark.parametrize(("model", "queue"), [("small", "chat"), ("large", "bulk"), (None, "chat")])
    def test_when_a_model_is_named_then_its_queue_is_chosen(self, site: Site, model: str | None, queue: str) -> None:
        assert site.queue_of(model) == getattr(site, queue)

    def test_when_their_engines_differ_then_each_model_has_those_of_its_workers(self, site: Site) -> None:
        one, other = "engine=a 1; exactness=bitwise", "engine=b 2; exactness=greedy only; refused=min_p,n"
        site.start(site.chat, "small", offer=one)
        site.start(site.chat, "small", offer=other)
        site.start(site.bulk, "large", offer=other)

        async def engines(queues: Queues) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
            names = await queues.models()
            return {name: [(offer.engine, offer.refused) for offer in queues.offers_of(name)] for name in names}

        assert site.ask(engines) == {
            "large": [("b 2", ("min_p", "n"))],
            "small": [("a 1", ()), ("b 2", ("min_p", "n"))],
        }

    def test_when_both_serve_a_model_then_the_first_is_chosen(self, site: Site) -> None:
        site.start(site.bulk, "small")

        assert site.queue_of("small") == site.chat

    def test_when_a_model_is_unknown_then_the_error_names_the_known_ones(self, site: Site) -> None:
        with pytest.raises(HttpError, match="'huge' is not served; served: large, small") as raised:
            site.queue_of("huge")

        assert raised.value.status == 404

    def test_when_the_settings_name_a_queue_then_its_jobs_wait_there(self, site: Site) -> None:
        assert site.queue_of("huge", huge=site.bulk) == site.bulk
        assert site.ask(Queues.models, huge=site.bulk) == ("huge", "large", "small")

    def test_when_a_worker_serves_a_model_then_that_counts_more_than_the_settings(self, site: Site) -> None:
        assert site.queue_of("large", large=site.chat) == site.bulk

    def test_when_a_worker_has_just_gone_then_its_queue_is_still_chosen(self, site: Site) -> None:
        async def question(queues: Queues) -> tuple[tuple[str, ...], str]:
            await queues.look()
            site.stop(site.bulk, "large")
            return await queues.models(), (await queues.of_model("large")).name

        assert site.ask(question) == (("small",), site.bulk)


class TestGivenAQueueOfFourPartitions:
    """The gateway was not told the number, and started before the workers."""

    def test_when_workers_have_stated_it_then_new_jobs_are_spread_over_all(self, site: Site) -> None:
        async def places(queues: Queues) -> set[int]:
            with Producer(site.server.url, queue=site.chat, partitions=4) as owner:
                owner.configure(calls.QueueSettings(partitions=4))
            await queues.look()
            return {queues.first.partitions.choose(str(number)) for number in range(50)}

        assert site.ask(places) == {0, 1, 2, 3}


class TestGivenAQueueWithAWrongNumberOfPartitions:
    """Of the two queues, the gateway was told another number for one than its workers serve."""

    def test_when_a_model_of_the_other_is_asked_for_then_it_is_served(self, wrong: Site) -> None:
        assert wrong.queue_of("small") == wrong.chat
        assert wrong.ask(Queues.models) == ("small",)

    def test_when_a_request_is_for_that_queue_then_the_setting_is_its_error(self, wrong: Site) -> None:
        with pytest.raises(InvalidSetting, match="serve 2 partitions"):
            wrong.queue_of("large")

    def test_when_the_gateway_is_checked_then_it_is_not_ready(self, wrong: Site) -> None:
        with pytest.raises(HttpError, match="serve 2 partitions") as raised:
            wrong.ask(Queues.check)

        assert raised.value.code == "gateway_misconfigured"

    def test_when_requests_come_then_a_look_logs_it_once(self, wrong: Site, caplog: pytest.LogCaptureFixture) -> None:
        async def question(queues: Queues) -> None:
            for _ in range(3):
                await queues.of_model("small")

        wrong.look_every_s = 60
        wrong.ask(question)

        assert [record.levelname for record in caplog.records if wrong.bulk in record.getMessage()] == ["WARNING"]


class TestGivenAQueueThatKeepsItsJobsOnDisk:
    """Its server writes an append-only file."""

    def test_when_the_gateway_is_checked_often_then_the_server_is_asked_once(self) -> None:
        with redis_server(is_durable=True) as server, server.client() as client:
            site = Site(server)
            with Producer(server.url, queue=site.chat) as owner:
                owner.configure(calls.QueueSettings(durability="aof"))
            client.config_resetstat()

            async def check(queues: Queues) -> None:
                for _ in range(3):
                    await queues.check()

            site.ask(check)

            assert client.info("commandstats")["cmdstat_config|get"]["calls"] == 1


class TestGivenQueuesWithoutAWorker:
    """No model is known."""

    def test_when_there_is_one_queue_then_every_model_waits_there(self, queue_server: RedisServer) -> None:
        site = Site(queue_server)

        assert site.queue_of("any", only_chat=True) == site.chat

    def test_when_there_are_two_queues_then_a_model_is_refused(self, queue_server: RedisServer) -> None:
        with pytest.raises(HttpError, match="served: none"):
            Site(queue_server).queue_of("any")


class TestGivenSettingsThatDoNotFit:
    """A queue is named twice, or not served."""

    def test_when_a_queue_is_given_twice_then_it_is_refused(self) -> None:
        with pytest.raises(InvalidSetting, match="--queue a is given more than once"):
            GatewaySettings(
                database_url="sqlite:////nowhere/history.db", queues=(ServedQueue("a"), ServedQueue("a", 2))
            )

    def test_when_a_model_s_queue_is_not_served_then_it_is_refused(self) -> None:
        with pytest.raises(InvalidSetting, match="--model m=b names a queue that is not served; served: a"):
            GatewaySettings(
                database_url="sqlite:////nowhere/history.db", queues=(ServedQueue("a"),), model_queues=(("m", "b"),)
            )


class TestGivenAGatewayOfTwoQueues:
    """The second one has the worker."""

    def test_when_its_model_is_asked_for_then_it_answers(self, queue_server: RedisServer) -> None:
        # The variable may be a worker's too, with weights.
        arguments = ("--queue", "empty:3", "--queue", "default", "--model", "later=empty")

        with gateway_process(queue_server.url, *arguments) as gateway:
            client = gateway.client()
            names = [model.id for model in client.models.list()]
            answer = client.completions.create(model="null", prompt="hello", max_tokens=4)

        assert names == ["later", "null"]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
