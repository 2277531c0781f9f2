"""The table of `worker status`, from the fields of heartbeats."""

from sluice.producer import Producer
from sluice.protocol.calls import Beat, QueueSettings, beat
from sluice.protocol.keys import QueueKeys
from sluice.protocol.redis.execution import run
from sluice.worker.config import load_config
from sluice.worker.status import living_workers, table_of
from tests.servers import RedisServer

WORKER = {"worker": "0123456789ab", "name": "one", "model": "m", "device": "cuda:0", "state": "pulling"}
WHERE = "queue 'default' at redis://example:6379"


class TestGivenAWorkerOnAGpu:
    def test_when_torch_replaces_some_of_its_kernels_then_a_warning_names_them(self) -> None:
        lines = table_of([WORKER | {"kernels": "rms_norm sample"}], WHERE).splitlines()

        assert lines[2:] == ["warning: worker 01234567: torch's operators replace the kernels of rms_norm sample"]

    def test_when_all_its_kernels_work_then_there_is_no_warning(self) -> None:
        assert len(table_of([WORKER | {"kernels": "-"}, WORKER], WHERE).splitlines()) == 3


class TestGivenWorkersOfTwoEngines:
    def test_when_the_table_is_made_then_a_line_says_what_each_engine_can_run(self) -> None:
        offers = (
            "engine=sluice 1; exactness=bitwise; features=logprobs,choices; refused=; families=llama; weights=plain",
            "engine=other 2; exactness=greedy only; features=choices; refused=logprobs,min_p; families=; weights=",
        )
        lines = table_of([WORKER | {"offer": offers[number]} for number in (0, 0, 1)], WHERE).splitlines()

        assert lines[4:] == [
            "engine sluice 1: resumes bitwise; has logprobs, choices; loads llama; weights plain",
            "engine other 2: resumes greedy only; has choices; refuses logprobs, min_p",
        ]


class TestGivenAWorkerThatServesTwoQueues:
    def test_when_the_table_is_made_then_it_says_which_and_their_weights(self) -> None:
        lines = table_of([WORKER | {"queues": "chat:3 batch"}, WORKER | {"queues": "chat"}], WHERE).splitlines()

        assert [line for line in lines if "queues" in line] == ["worker 01234567 serves the queues chat:3, batch"]


class TestGivenWorkersOfOneModelWithAdapters:
    def test_when_the_table_is_made_then_one_line_names_them(self) -> None:
        lines = table_of([WORKER | {"adapters": "law poet"}, WORKER | {"adapters": "law poet"}, WORKER], WHERE)

        assert lines.splitlines()[4:] == ["model m has the adapters law, poet"]


class TestGivenNoWorker:
    def test_when_the_table_is_made_then_it_names_queue_and_server(self) -> None:
        assert table_of([], WHERE) == "no living workers on queue 'default' at redis://example:6379"


class TestGivenAWorkerOfTwoQueues:
    def test_when_both_are_asked_then_it_is_there_once(self, valkey: RedisServer) -> None:
        told = Beat(incarnation="w1", held=(), processed_pull=0, expiry_ms=60_000, about={"model": "small"})
        with valkey.client() as client:
            for queue in ("chat", "batch"):
                run(client, beat(QueueKeys(queue), told))

        for queues in ("chat:3 batch", "batch"):
            config = load_config({"SLUICE_QUEUE": queues})
            assert [one["worker"] for one in living_workers(config, valkey.url)] == ["w1"]


class TestGivenAWorkerOfTwoPartitions:
    def test_when_no_number_is_given_then_it_is_found_on_the_last_one(self, valkey: RedisServer) -> None:
        with Producer(valkey.url, partitions=2) as owner:
            owner.configure(QueueSettings(partitions=2))
        told = Beat(incarnation="w1", held=(), processed_pull=0, expiry_ms=60_000, about={"model": "small"})
        with valkey.client() as client:
            run(client, beat(QueueKeys("default", 1), told))

        assert [one["worker"] for one in living_workers(load_config({}), valkey.url)] == ["w1"]
