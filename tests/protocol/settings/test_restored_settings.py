"""Settings that Redis has lost: workers that remember them write them again, and nothing over a newer value."""

from dataclasses import replace

import pytest
from redis.exceptions import ResponseError

from sluice.protocol import calls, limits
from sluice.protocol.calls import Call, KnownSettings
from sluice.worker.serve.settings_memory import read_settings
from tests.protocol.driving import Queue, new_job, short

BROKEN = {"mode": "1; x", "starting": "17 host", "unheard_of": "1", "test_clock_offset_ms": "3600000"}


def read(queue: Queue, known: KnownSettings | None = None) -> KnownSettings:
    """What a worker knows after a read with this memory."""
    return queue.run(calls.restore_settings(queue.keys, known or KnownSettings()))


def stamp_of_beat(queue: Queue) -> str:
    """What a heartbeat says of the settings."""
    return queue.worker("A").beat().settings_stamp


@pytest.fixture
def known(queue: Queue) -> KnownSettings:
    """A worker's memory of settings that are lost."""
    read(queue)
    for change in ({"keep_prompts": "none"}, {"max_job_tokens": 100}, {"weights": {"t": 3.0}}):
        queue.configure(**change)
    found = read(queue)
    queue.client.flushall()
    return found


class TestGivenSettingsThatAWorkerHasRead:
    def test_when_nothing_changes_then_each_beat_has_the_same_stamp(self, queue: Queue) -> None:
        assert stamp_of_beat(queue) == ""

        known = read(queue)

        assert known.stamp == stamp_of_beat(queue) == stamp_of_beat(queue)
        assert read(queue).stamp == known.stamp

    def test_when_one_changes_then_the_stamp_changes_and_the_read_has_it(self, queue: Queue) -> None:
        known = read(queue)

        queue.configure(max_job_tokens=7)

        assert stamp_of_beat(queue) != known.stamp
        assert read(queue, known).values["max_job_tokens"] == "7"

    def test_when_one_is_removed_then_it_stays_so(self, queue: Queue) -> None:
        queue.configure(keep_prompts="none")
        known = read(queue)
        queue.run(Call("configure", queue.keys.fixed(), ("keep_prompts", ""), lambda reply: reply))

        assert read(queue, known).restored == ()
        assert "keep_prompts" not in queue.hash_of("config")


class TestGivenWeights:
    def test_when_one_is_removed_then_it_is_gone(self, queue: Queue) -> None:
        queue.configure(weights={"a": 2.0, "b": 3.0})

        queue.run(Call("configure", queue.keys.fixed(), ("weight:a", ""), lambda reply: reply))

        assert queue.hash_of("weights") == {"b": "3.0"}

    def test_when_their_key_is_foreign_then_they_count_as_one_and_no_setting_is_half_written(
        self, queue: Queue
    ) -> None:
        queue.client.set(queue.keys.key("weights"), "foreign")
        queue.add("one")

        with pytest.raises(ResponseError, match="weights is a string and must be a hash"):
            queue.configure(mode="fifo", weights={"a": 2.0})

        assert queue.hash_of("config").keys() == {"test_clock_ms"}
        assert short(queue.worker("A").pull().jobs) == ["one"]
        assert "mode" not in queue.look().settings


class TestGivenSettingsThatAreLost:
    def test_when_a_worker_reads_then_they_are_back(self, queue: Queue, known: KnownSettings) -> None:
        assert stamp_of_beat(queue) == ""

        again = read(queue, known)

        assert set(again.restored) == {"keep_prompts", "max_job_tokens", "weight:t"}
        assert queue.look().settings.items() >= {"keep_prompts": "none", "weight:t": "3.0"}.items()
        assert read(queue, known).restored == ()

    def test_when_one_has_a_newer_value_then_that_stays(self, queue: Queue, known: KnownSettings) -> None:
        queue.configure(keep_prompts="hash")

        assert set(read(queue, known).restored) == {"max_job_tokens", "weight:t"}
        assert queue.look().settings["keep_prompts"] == "hash"

    def test_when_a_new_worker_is_first_then_the_older_still_restores(self, queue: Queue, known: KnownSettings) -> None:
        """The new one knows a part; it learns the others by the stamp that changes."""
        queue.configure(max_job_tokens=50)
        new = read(queue)

        assert set(read(queue, known).restored) == {"keep_prompts", "weight:t"}

        assert stamp_of_beat(queue) != new.stamp
        assert read(queue, new).values.items() >= {"keep_prompts": "none", "max_job_tokens": "50"}.items()

    def test_when_a_worker_with_an_older_memory_is_first_then_nothing_is_missing(
        self, queue: Queue, known: KnownSettings
    ) -> None:
        first = KnownSettings(stamp=known.stamp.replace(":3", ":1"), values={"keep_prompts": "none"})
        assert first.stamp != known.stamp
        read(queue, first)

        assert set(read(queue, known).restored) == {"max_job_tokens", "weight:t"}

    def test_when_the_memory_has_what_is_no_setting_then_it_is_not_written(
        self, queue: Queue, known: KnownSettings
    ) -> None:
        memory = KnownSettings(stamp=known.stamp, values={**known.values, **BROKEN, "dead_set_max": "5"})

        assert "dead_set_max" in read(queue, memory).restored
        assert not BROKEN.keys() & queue.hash_of("config").keys()

    def test_when_the_mode_comes_back_then_waiting_jobs_have_its_order(self, queue: Queue) -> None:
        queue.configure(mode="fifo")
        known = read(queue)
        queue.client.flushall()
        queue.submit(*[new_job(f"a{i}", "first") for i in range(3)])
        queue.submit(*[new_job(f"b{i}", "second") for i in range(3)])

        read(queue, known)

        assert short(queue.worker("A").pull(sequences=4).jobs) == ["a0", "a1", "a2", "b0"]


class TestGivenMoreSettingsThanACallTakes:
    NUM_TENANTS = 2 * limits.SETTINGS_PER_CALL + 10

    @pytest.fixture
    def many(self, one_queue: Queue) -> KnownSettings:
        """A worker's memory of weights and limits."""
        names = [f"t{i}" for i in range(self.NUM_TENANTS)]
        one_queue.configure(partitions=2, weights=dict.fromkeys(names, 3.0), max_running=dict.fromkeys(names, 5))
        return read_settings(one_queue.client, one_queue.keys, KnownSettings())

    def test_when_a_worker_reads_then_it_knows_all(self, one_queue: Queue, many: KnownSettings) -> None:
        assert sum(name.startswith("weight:") for name in many.values) == self.NUM_TENANTS
        assert sum(name.startswith("max_running:") for name in many.values) == self.NUM_TENANTS
        assert many.values["partitions"] == "2"
        assert many.stamp == stamp_of_beat(one_queue)

    def test_when_all_are_lost_then_they_are_back(self, one_queue: Queue, many: KnownSettings) -> None:
        one_queue.client.flushall()

        again = read_settings(one_queue.client, one_queue.keys, many)

        assert set(again.restored) == many.values.keys() - {"stamp", "limited", "test_clock_ms"}
        assert {**again.values, "stamp": ""} == {
            name: value for name, value in {**many.values, "stamp": ""}.items() if name != "test_clock_ms"
        }
        assert again.stamp == stamp_of_beat(one_queue)
        assert read_settings(one_queue.client, one_queue.keys, again).restored == ()

    def test_when_the_worker_dies_amid_it_then_another_restores_the_rest(
        self, one_queue: Queue, many: KnownSettings
    ) -> None:
        one_queue.client.flushall()
        first = dict(sorted(many.values.items())[: limits.SETTINGS_PER_CALL])
        one_queue.run(calls.restore_settings(one_queue.keys, replace(many, values=first), has_more=True))
        assert stamp_of_beat(one_queue) == ""

        read_settings(one_queue.client, one_queue.keys, many)

        assert len(one_queue.hash_of("weights")) == self.NUM_TENANTS
        assert len([name for name in one_queue.hash_of("limits") if "max_running" in name]) == self.NUM_TENANTS

    def test_when_nothing_is_lost_then_one_call_says_so(self, one_queue: Queue, many: KnownSettings) -> None:
        before = num_calls(one_queue)

        assert read_settings(one_queue.client, one_queue.keys, many).restored == ()

        assert num_calls(one_queue) - before < 12


def num_calls(queue: Queue) -> int:
    """Scripts that the server has run."""
    return queue.client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)
