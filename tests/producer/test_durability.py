"""What a client reports of durability before it sends anything, and how the `producer` command shows it."""

from pathlib import Path

import pytest

from sluice.producer import AsyncProducer, Producer
from sluice.producer.cli.main import main
from sluice.producer.errors import DurabilityRefused, InvalidJob, InvalidSetting, LessDurable
from sluice.protocol.calls import QueueSettings
from sluice.protocol.durability import Durability, Level, read_durability
from tests.chaos.faults.replicated import replicated
from tests.servers import RedisServer


class TestGivenTheNameOfALevel:
    @pytest.mark.parametrize(
        ("text", "meant"),
        [
            ("memory", Durability(Level.MEMORY)),
            ("aof", Durability(Level.AOF)),
            ("fsync", Durability(Level.FSYNC)),
            ("replica:1", Durability(Level.REPLICA, 1)),
            ("replica:12", Durability(Level.REPLICA, 12)),
        ],
    )
    def test_when_it_is_read_then_it_can_be_written_again(self, text: str, meant: Durability) -> None:
        assert read_durability(text) == meant
        assert str(meant) == text

    @pytest.mark.parametrize(
        "text", ["", "disk", "replica", "replica:", "replica:0", "replica:-1", "replica:²", "aof:1", "memory:", 7]
    )
    def test_when_there_is_no_such_level_then_the_error_lists_them(self, text: str) -> None:
        with pytest.raises(ValueError, match="must be memory, aof, fsync or replica:N"):
            read_durability(text)


class TestGivenAServerWithoutAFile:
    async def test_when_more_is_asked_for_than_it_keeps_then_nothing_is_submitted_in_any_way(
        self, valkey: RedisServer
    ) -> None:
        refused = pytest.raises(DurabilityRefused, match=r"cannot guarantee aof: its append-only file is off.*Nothing")
        with Producer(valkey.url, durability="aof") as producer:
            with refused:
                producer.submit("hello")
            with refused:
                list(producer.submit_many(["hello"]))
            assert producer.submit("hello", durability="memory").ahead_jobs == 0
        async with AsyncProducer(valkey.url, durability="aof") as aproducer:
            with refused:
                await aproducer.submit("hello")
            with refused:
                _ = [answer async for answer in aproducer.submit_many(["hello"])]
            assert (await aproducer.submit("hello", durability="memory")).ahead_jobs == 1

    def test_when_there_is_no_such_level_then_it_is_an_invalid_job(self, valkey: RedisServer) -> None:
        with pytest.raises(InvalidJob, match="durability"):
            Producer(valkey.url, durability="much")
        with Producer(valkey.url) as producer, pytest.raises(InvalidJob, match="durability"):
            producer.submit("hello", durability="much")


class TestGivenAServerWhoseFileGoesAway:
    def test_when_a_later_submit_finds_it_gone_then_its_job_is_accepted_and_less_durable(
        self, durable_valkey: RedisServer
    ) -> None:
        with Producer(durable_valkey.url, durability="aof") as producer, durable_valkey.client() as client:
            producer.submit("hello")
            client.config_set("appendonly", "no")

            with pytest.raises(LessDurable, match="less durable than aof: its append-only file is off"):
                producer.submit("hello")
            assert producer.queue()[0].waiting_jobs == 2


class TestGivenAReplicaThatStopped:
    @pytest.mark.timeout(60)
    def test_when_the_client_has_no_patience_then_it_is_told_at_once(self) -> None:
        """WAIT without a limit would block the connection for good."""
        with replicated() as pair, Producer(pair.primary.url, patience_s=0, durability="replica:1") as producer:
            pair.stop_replica()
            try:
                with pytest.raises(LessDurable, match="0 of 1 replicas"):
                    producer.submit("hello")
            finally:
                pair.resume_replica()


class TestGivenAQueueWithADefault:
    def test_when_a_submit_does_not_say_then_the_queue_s_default_holds(self, valkey: RedisServer) -> None:
        with Producer(valkey.url) as producer:
            producer.configure(QueueSettings(durability="aof"))

            with pytest.raises(DurabilityRefused, match="append-only file is off"):
                producer.submit("hello")
            assert producer.submit("hello", durability="memory").id

    def test_when_the_default_is_none_of_the_levels_then_the_error_names_the_queue(self, valkey: RedisServer) -> None:
        with Producer(valkey.url) as producer:
            producer.configure(QueueSettings(durability="much"))

            with pytest.raises(InvalidSetting, match="the settings of queue 'default' are wrong: durability must be"):
                producer.submit("hello")


class TestGivenWorkersOfTwoPartitions:
    @pytest.mark.parametrize("level", [None, "memory", "aof"])
    def test_when_a_client_has_four_then_it_is_refused_at_every_level(
        self, durable_valkey: RedisServer, level: str | None
    ) -> None:
        with Producer(durable_valkey.url, partitions=2) as owner:
            owner.configure(QueueSettings(partitions=2))

        with (
            Producer(durable_valkey.url, partitions=4, durability=level) as producer,
            pytest.raises(InvalidSetting, match="serve 2 partitions, and this client was made for 4"),
        ):
            producer.submit("hello")


class TestGivenTheCommand:
    @pytest.fixture
    def lines(self, valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("SLUICE_REDIS_URL", valkey.url)
        monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path))
        path = tmp_path / "lines.jsonl"
        path.write_text('{"prompt": "hello"}\n')
        return str(path)

    @pytest.mark.parametrize(
        ("level", "code", "words"), [("fsync", 1, "append-only file is off"), ("much", 2, "must be memory, aof, fsync")]
    )
    def test_when_a_level_cannot_be_had_then_it_says_why(
        self, lines: str, level: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["submit", lines, "--durability", level])

        assert ended.value.code == code
        assert words in capsys.readouterr().err

    def test_when_the_queue_s_default_is_set_then_submits_without_a_level_obey_it(
        self, lines: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["queues", "set", "--durability", "aof"])
        assert ended.value.code in (None, 0)

        with pytest.raises(SystemExit) as ended:
            main(["submit", lines])

        assert ended.value.code == 1
        assert "append-only file is off" in capsys.readouterr().err
