"""The book of held jobs: what a beat says is true of one instant, and an older lease never speaks for a newer one."""

from sluice.engine.request import Request, Room
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId, JobSpec
from sluice.worker.jobs.held_job import FORGET_PROMPT_BYTES, HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.model.sampling_defaults import NOTHING_STATED, resolve
from sluice.worker.serve.mailbox import Mailbox

ONE, TWO = QueueKeys("q", 0), QueueKeys("q", 1)


def job(name: str, *, epoch: int = 1, keys: QueueKeys = ONE, payload: bytes = b"p", choices: int = 1) -> HeldJob:
    leased = LeasedJob(
        id=JobId(f"{keys.partition}.t.{name}"), epoch=epoch, attempt=epoch, priority=0, spec=b"", payload=payload,
        seed=1, choices=choices, submitted_ms=0, pulled_ms=0, deadline_ms=None, prompt_tokens=1,
        published=(3,) * choices, ended=(False,) * choices, fingerprint=None, fits=True,
    )  # fmt: skip
    return Leases().new_job(leased, keys, JobSpec())


class TestGivenPullsOfTwoPartitions:
    def test_when_a_beat_is_made_then_it_lists_its_partitions_jobs_and_its_last_pull(self) -> None:
        leases = Leases()
        first, second = job("a"), job("b", epoch=2)
        leases.take(ONE, 4, [first, second])
        leases.take(TWO, 9, [job("c", keys=TWO)])

        held = leases.held(ONE)

        assert dict(held.requests) == {"0.t.a": first.request_id, "0.t.b": second.request_id}
        assert held.processed_pull == 4
        assert leases.held(TWO).processed_pull == 9

    def test_when_nothing_was_pulled_then_no_pull_is_processed(self) -> None:
        assert Leases().held(ONE).processed_pull == 0

    def test_when_a_job_has_ended_then_it_is_listed_no_more(self) -> None:
        leases, ended = Leases(), job("a")
        leases.take(ONE, 1, [ended])

        assert leases.remove(ended)

        assert not leases.remove(ended)
        assert dict(leases.held(ONE).requests) == {}
        assert len(leases) == 0


class TestGivenTwoQueuesWithJobsOfTheSameId:
    def test_when_both_are_pulled_then_each_is_held(self) -> None:
        chat, batch, leases = QueueKeys("chat"), QueueKeys("batch"), Leases()
        of_chat, of_batch = job("a", keys=chat), job("a", keys=batch)

        replaced = [*leases.take(chat, 1, [of_chat]), *leases.take(batch, 1, [of_batch])]

        assert replaced == []
        assert (leases.of_job(chat, of_chat.id), leases.of_job(batch, of_batch.id)) == (of_chat, of_batch)
        assert [len(leases.held(keys).requests) for keys in (chat, batch)] == [1, 1]


class TestGivenAJobThatComesBack:
    """It was leased, lost, and is leased again."""

    def test_when_pulled_again_then_the_newer_lease_replaces_the_older(self) -> None:
        leases, older, newer = Leases(), job("a", epoch=1), job("a", epoch=3)
        leases.take(ONE, 1, [older])

        replaced = leases.take(ONE, 2, [newer])

        assert replaced == [older]
        assert leases.of_request(older.request_id) is None
        assert leases.of_request(newer.request_id) is newer
        assert leases.of_job(ONE, newer.id) is newer

    def test_when_the_queue_forgot_the_first_pull_then_the_second_is_another_request(self) -> None:
        """Redis lost its last second: the loop has not yet received the loss when the job is delivered anew."""
        leases, older, newer = Leases(), job("a", epoch=1), job("a", epoch=1)
        mailbox = Mailbox(max_buffered_bytes=1)
        leases.take(ONE, 1, [older])
        mailbox.lose([one.request_id for one in leases.take(ONE, 2, [newer])])
        mailbox.deliver([Request(id=newer.request_id, prompt_token_ids=(1,))])

        added = mailbox.new_requests(Room(kv_tokens=1, prefill_tokens=1, sequences=1), wait_s=0)
        dropped = mailbox.lost()

        assert [one.id for one in added if one.id not in dropped] == [newer.request_id]
        assert leases.of_request(older.request_id) is None, "its late deltas have no lease"
        assert leases.held(ONE).requests[newer.id] != older.request_id, "a late beat speaks for the older alone"

    def test_when_the_older_is_removed_late_then_the_newer_stays(self) -> None:
        leases, older, newer = Leases(), job("a", epoch=1), job("a", epoch=3)
        leases.take(ONE, 1, [older])
        leases.take(ONE, 2, [newer])

        leases.remove(older)

        assert leases.of_job(ONE, newer.id) is newer


class TestGivenALongPrompt:
    def test_when_it_is_translated_then_its_bytes_are_let_go(self) -> None:
        long, short = job("a", payload=b"x" * (FORGET_PROMPT_BYTES + 1)), job("b", payload=b"x")

        for one in (long, short):
            one.record_translation(
                Request(id="r", prompt_token_ids=(1,) * 7), resolve(NOTHING_STATED, NOTHING_STATED, frozenset())
            )

        assert long.leased.payload == b""
        assert short.leased.payload == b"x"
        assert long.num_published == 3
