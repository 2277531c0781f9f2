"""Which job a line becomes: the same again on the same queue, another for everything that makes it another."""

import json
from pathlib import Path

from sluice.producer import Producer
from sluice.producer.bulk.run import BulkRun, BulkSettings
from sluice.protocol.bulk_files.input import BadLine, LineReader, lines, opened
from sluice.protocol.bulk_files.jobs import BulkSpec, LineJobs
from sluice.protocol.bulk_files.journal import name_of
from sluice.protocol.jobs import Options
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId
from tests.producer.worker_side import HandWorker
from tests.servers import RedisServer


def ids_of(path: Path, spec: BulkSpec) -> list[JobId]:
    """The ids of the jobs of a file's lines."""
    reader, made = LineReader(endpoint=None, model=None, defaults=Options()), LineJobs(spec)
    with opened(str(path)) as file:
        read = [reader.read(number, line) for number, line in lines(file)]
    return [made.job(line).id for line in read if not isinstance(line, BadLine)]


class TestGivenOneFile:
    def test_when_it_is_submitted_to_two_queues_then_each_has_its_own_answers(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        path = tmp_path / "in.jsonl"
        path.write_text('{"prompt": "hello"}\n')
        settings = BulkSettings(path=str(path), batch="b")

        submitted: list[str] = []
        for queue in ("small", "large"):
            with Producer(valkey.url, queue=queue) as producer, valkey.client() as client:
                with BulkRun.opened(producer, settings, lambda _counts: None) as run:
                    run.submit()
                submitted += [leased.id for leased in HandWorker(client, QueueKeys(queue)).pull()]

        assert len(set(submitted)) == 2

    def test_when_it_is_of_two_tenants_then_each_has_its_own_names(self, tmp_path: Path) -> None:
        path = tmp_path / "in.jsonl"
        path.write_text('{"prompt": "hello"}\n{"prompt": "hello", "tenant": "acme"}\n')

        both = ids_of(path, BulkSpec(queue="q", batch="b"))
        path.write_text('{"prompt": "hello", "tenant": "acme"}\n')
        [alone] = ids_of(path, BulkSpec(queue="q", batch="b"))

        assert len({name_of(job_id) for job_id in both}) == 2
        assert both[1] == alone

    def test_when_its_jobs_are_made_again_then_they_are_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "in.jsonl"
        path.write_text('{"prompt": "hello"}\n' * 2)
        spec = BulkSpec(queue="q", batch="b")

        first, second = ids_of(path, spec), ids_of(path, spec)

        assert first == second
        assert len(set(first)) == 2


class TestGivenEqualLines:
    def test_when_one_has_the_custom_id_of_a_count_then_both_are_jobs(self, tmp_path: Path) -> None:
        path = tmp_path / "in.jsonl"
        custom_ids = ["#0", "0", "#1", "1"]
        written = [{"prompt": "hello"}] * 2 + [{"prompt": "hello", "custom_id": one} for one in custom_ids]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in written))

        found = ids_of(path, BulkSpec(queue="q", batch="b"))

        assert len(set(found)) == len(written)
