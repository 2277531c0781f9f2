"""Lines whose answer is made of several jobs: lists of texts to embed, and documents to rerank."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import openai
import pytest

from sluice.gateway.batches.batch import StoredBatch
from sluice.gateway.batches.taken import Workshop
from sluice.gateway.files.storage import Storage
from sluice.producer.client import Producer
from sluice.protocol.calls import QueueSettings
from sluice.protocol.keys import QueueKeys
from sluice.protocol.states import JobState
from tests.gateway.batches.processes import begun, encoded, until
from tests.gateway.batches.processes import lines_of as lines_of_file
from tests.gateway.batches.steps import added, custom_ids, go_on, lines_of
from tests.gateway.batches.steps import until as until_stored
from tests.gateway.gateway_process import GatewayProcess
from tests.producer.worker_side import HandWorker

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TEXTS = ["one", "two words", "one", "three more words"]
EMBEDDED: list[dict[str, Any]] = [
    {"input": TEXTS},
    {"input": "one"},
    {"input": ["one"]},
    {"input": [[116, 101, 97], [111, 110, 101]]},
    {"input": TEXTS, "encoding_format": "base64", "dimensions": 4},
    {"input": "one", "encoding_format": "base64"},
    {"input": ["word"] * 300},
]
RANKED: list[dict[str, Any]] = [
    {"query": "tea", "documents": TEXTS},
    {"query": "tea", "documents": ["one"], "return_documents": False},
    {"query": "größer ☃", "documents": [{"text": "one"}, "two"], "top_n": 1},
]


def lines(endpoint: str, bodies: list[dict[str, Any]]) -> bytes:
    """A file with these requests, and blank lines among them."""
    made = (
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {"model": "null", **body}}
        for number, body in enumerate(bodies)
    )
    return b"\n" + b"\n\n".join(encoded([line]) for line in made)


def of_three(num_lines: int = 1) -> bytes:
    """A file whose lines have three texts each."""
    return lines(EMBEDDINGS, [{"input": ["one", "two", "six"]}] * num_lines)


class CountingStorage(Storage):
    """A storage that notes which objects are opened for reading."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened: list[str] = []

    @contextmanager
    def reading(self, key: str) -> Generator[BinaryIO]:
        self.opened.append(key)
        with super().reading(key) as file:
            yield file


class TestGivenAFileOfSuchLines:
    @pytest.mark.parametrize(("endpoint", "bodies"), [(EMBEDDINGS, EMBEDDED), (RERANK, RANKED)])
    def test_when_its_batch_ends_then_each_line_has_the_answer_of_the_direct_endpoint(
        self,
        client: openai.OpenAI,
        batch_gateway: GatewayProcess,
        endpoint: str,
        bodies: list[dict[str, Any]],
    ) -> None:
        with batch_gateway.http() as http:
            direct = [http.post(endpoint, json={"model": "null", **body}).json() for body in bodies]

        batch = until(client, begun(client, lines(endpoint, bodies), endpoint=endpoint))

        counts = batch.request_counts
        assert counts is not None
        assert (batch.status, counts.total, counts.completed) == ("completed", len(bodies), len(bodies))
        found = {line["custom_id"]: line["response"]["body"] for line in lines_of_file(client, batch.output_file_id)}
        for number, expected in enumerate(direct):
            # The id of an answer is that of its job.
            assert {**found[str(number)], "id": None} == {**expected, "id": None}

    def test_when_one_text_is_too_long_then_its_line_alone_has_the_error_of_the_endpoint(
        self, client: openai.OpenAI
    ) -> None:
        bodies = [{"input": ["one", "word " * 20_000, "two"]}, {"input": ["one", "two"]}]

        batch = until(client, begun(client, lines(EMBEDDINGS, bodies), endpoint=EMBEDDINGS))

        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)
        [line] = lines_of_file(client, batch.error_file_id)
        error = line["response"]["body"]["error"]
        assert (line["custom_id"], error["code"], error["param"]) == ("0", "context_length_exceeded", "input")

    @pytest.mark.parametrize(
        ("endpoint", "body", "param"),
        [
            (EMBEDDINGS, {"input": ["a", ""]}, "input"),
            (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
            (RERANK, {"query": "tea", "documents": []}, "documents"),
        ],
    )
    def test_when_a_line_is_wrong_then_the_batch_fails_and_names_it(
        self, client: openai.OpenAI, endpoint: str, body: dict[str, Any], param: str
    ) -> None:
        batch = until(client, begun(client, lines(endpoint, [body]), endpoint=endpoint))

        assert batch.status == "failed"
        assert batch.errors is not None
        assert [error.param for error in batch.errors.data or []] == [param]


class TestGivenATask:
    """Run by hand, with a worker that is moved by hand."""

    def test_when_some_jobs_of_a_line_have_ended_then_the_line_is_not_collected(
        self, workshop: Workshop, worker: HandWorker
    ) -> None:
        batch = added(workshop, of_three(2), endpoint=EMBEDDINGS)
        begun_ = go_on(workshop, batch)
        jobs = worker.pull()
        for job in jobs[:4]:
            worker.generate(job)
        workshop.batches.change(begun_, written_ms=1)

        between = go_on(workshop, batch)
        for job in jobs[4:]:
            worker.generate(job)
        ended = go_on(workshop, batch)

        assert len({job.id for job in jobs}) == 6
        assert (begun_.total, begun_.submitted) == (2, 2)
        assert (between.num_collected, between.completed, between.failed) == (1, 1, 0)
        assert (ended.status, ended.completed, ended.failed) == ("completed", 2, 0)
        for line in lines_of(workshop, ended.output_file):
            assert [one["index"] for one in line["response"]["body"]["data"]] == [0, 1, 2]

    def test_when_a_job_fails_then_its_line_has_the_first_error(self, workshop: Workshop, worker: HandWorker) -> None:
        batch = added(workshop, of_three(2), endpoint=EMBEDDINGS)
        go_on(workshop, batch)
        jobs = worker.pull()
        for number in (2, 1):
            worker.say(jobs[number], (), "", end=JobState.FAILED, error=f"{number} broke", code="broke")
        for number in (0, 3, 4, 5):
            worker.generate(jobs[number])

        ended = go_on(workshop, batch)

        assert (ended.status, ended.completed, ended.failed) == ("completed", 1, 1)
        [error] = lines_of(workshop, ended.error_file)
        assert error["error"] == {"code": "broke", "message": "1 broke"}

    def test_when_the_queue_is_full_amid_a_line_then_it_goes_on_there(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        producer.configure(QueueSettings(max_waiting_jobs=2))
        batch = added(workshop, of_three(3), endpoint=EMBEDDINGS)
        num_jobs = 0

        def is_over(found: StoredBatch) -> bool:
            nonlocal num_jobs
            for job in worker.pull():
                worker.generate(job)
                num_jobs += 1
            return found.status == "completed"

        ended = until_stored(workshop, batch, is_over)

        assert num_jobs == 9
        assert custom_ids(lines_of(workshop, ended.output_file)) == ["0", "1", "2"]

    def test_when_the_queue_refuses_one_text_then_its_line_has_the_refusal(
        self, workshop: Workshop, worker: HandWorker, producer: Producer
    ) -> None:
        producer.configure(QueueSettings(max_job_tokens=20))
        bodies = [{"input": [[1], [2] * 30, [3]]}, {"input": [[1], [2]]}]
        batch = added(workshop, lines(EMBEDDINGS, bodies), endpoint=EMBEDDINGS)
        go_on(workshop, batch)
        for job in worker.pull():
            worker.generate(job)

        ended = go_on(workshop, batch)

        assert (ended.status, ended.completed, ended.failed) == ("completed", 1, 1)
        assert custom_ids(lines_of(workshop, ended.output_file)) == ["1"]
        assert custom_ids(lines_of(workshop, ended.error_file)) == ["0"]

    def test_when_the_queue_loses_a_job_then_each_line_has_one_outcome(
        self, workshop: Workshop, worker: HandWorker, redis_client: Any
    ) -> None:
        batch = added(workshop, of_three(2), endpoint=EMBEDDINGS)
        go_on(workshop, batch)
        jobs = worker.pull()
        for job in jobs[:3]:
            worker.generate(job)
        keys = QueueKeys("default")
        redis_client.delete(keys.result(jobs[1].id), keys.job(jobs[1].id), keys.channel(jobs[1].id))
        for job in jobs[3:]:
            worker.generate(job)

        def is_over(found: StoredBatch) -> bool:
            for job in worker.pull():
                worker.generate(job)
            return found.status == "completed"

        ended = until_stored(workshop, batch, is_over)

        found = custom_ids(lines_of(workshop, ended.output_file)) + custom_ids(lines_of(workshop, ended.error_file))
        assert sorted(found) == ["0", "1"]

    def test_when_many_lines_are_collected_then_the_file_is_opened_once_for_them(
        self, workshop: Workshop, worker: HandWorker, tmp_path: Path
    ) -> None:
        storage = CountingStorage((tmp_path / "files").as_uri())
        counted = replace(workshop, storage=storage)
        batch = added(counted, of_three(40), endpoint=EMBEDDINGS)
        go_on(counted, batch)
        while jobs := worker.pull():
            for job in jobs:
                worker.generate(job)
        storage.opened.clear()

        ended = go_on(counted, batch)

        assert (ended.status, ended.completed) == ("completed", 40)
        assert len(storage.opened) == 1

    def test_when_the_list_of_names_is_lost_then_it_is_made_again(self, workshop: Workshop, worker: HandWorker) -> None:
        batch = added(workshop, of_three(2), endpoint=EMBEDDINGS)
        begun_ = go_on(workshop, batch)
        assert begun_.names is not None
        workshop.storage.put(begun_.names, b"{}")
        for job in worker.pull():
            worker.generate(job)

        ended = go_on(workshop, batch)

        assert custom_ids(lines_of(workshop, ended.output_file)) == ["0", "1"]
