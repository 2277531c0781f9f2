"""Embeddings and scores of prompts through a gateway, with the stock `openai` client."""

import base64
import math
from array import array
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice.producer import IdempotencyConflict, InvalidJob, JobFailed, Producer, QueueFull
from sluice.protocol.calls import QueueSettings
from sluice.worker.model.folders import SMALL_MODEL
from tests.end_to_end.processes import worker_pool
from tests.gateway.gateway_process import GatewayProcess, gateway_process
from tests.servers import RedisServer, redis_server

NULL = "null"
SLOW = "null?token_s=0.00005"
TEXTS = ["one", "two words", "three more words"]


def vector(gateway: GatewayProcess, text: str) -> list[float]:
    return gateway.client().embeddings.create(model=NULL, input=text).data[0].embedding


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Generator[GatewayProcess]:
    """A gateway of a worker with the small model."""
    with (
        redis_server("valkey") as server,
        worker_pool(server.url, tmp_path_factory.mktemp("embeddings")) as pool,
        gateway_process(server.url) as made,
    ):
        pool.start_all(1, MODEL=str(SMALL_MODEL), POOLING="mean")
        yield made


def product(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def posted(gateway: GatewayProcess, path: str, **body: Any) -> dict[str, Any]:
    with gateway.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestGivenTheStockClient:
    def test_when_a_text_is_embedded_then_its_vector_has_length_1(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().embeddings.create(model=NULL, input="hello")

        assert math.hypot(*answer.data[0].embedding) == pytest.approx(1)
        assert answer.model == NULL
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)

    def test_when_several_texts_are_embedded_then_their_vectors_are_in_order(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().embeddings.create(model=NULL, input=TEXTS)

        assert [one.index for one in answer.data] == [0, 1, 2]
        assert [one.embedding for one in answer.data] == [vector(gateway, text) for text in TEXTS]
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS))

    def test_when_token_ids_are_embedded_then_they_are_the_texts(self, gateway: GatewayProcess) -> None:
        ids = [list(text.encode()) for text in TEXTS]

        several = gateway.client().embeddings.create(model=NULL, input=ids)
        single = gateway.client().embeddings.create(model=NULL, input=ids[0])

        assert [one.embedding for one in several.data] == [vector(gateway, text) for text in TEXTS]
        assert single.data[0].embedding == vector(gateway, TEXTS[0])

    def test_when_dimensions_are_given_then_the_first_ones_are_scaled_again(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().embeddings.create(model=NULL, input="one", dimensions=4)

        first = vector(gateway, "one")[:4]
        assert answer.data[0].embedding == pytest.approx([x / math.hypot(*first) for x in first], rel=1e-5)

    def test_when_a_key_is_repeated_then_the_vectors_are_those_of_the_same_jobs(self, gateway: GatewayProcess) -> None:
        headers = {"Idempotency-Key": "embedded twice"}

        first, second = (
            gateway.client().embeddings.create(model=NULL, input=TEXTS, extra_headers=headers) for _ in range(2)
        )

        assert first.data == second.data


class TestGivenHttp:
    def test_when_no_encoding_is_given_then_a_vector_is_a_list(self, gateway: GatewayProcess) -> None:
        numbers = posted(gateway, "/v1/embeddings", input="one")["data"][0]["embedding"]
        coded = posted(gateway, "/v1/embeddings", input="one", encoding_format="base64")["data"][0]["embedding"]

        assert array("f", base64.b64decode(coded)).tolist() == numbers

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "input"),
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": ["a", ""]}, "input"),
            ({"input": [[1], []]}, "input"),
            ({"input": [1, "a"]}, "input"),
            ({"input": {"a": 1}}, "input"),
            ({"input": ["a"] * 2049}, "input"),
            ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a", "temperature": 1}, "temperature"),
        ],
    )
    def test_when_a_value_is_wrong_then_it_is_400_and_names_it(
        self, gateway: GatewayProcess, body: dict[str, Any], param: str
    ) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/embeddings", json=body)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    def test_when_the_model_has_fewer_dimensions_then_it_is_400_with_their_number(
        self, gateway: GatewayProcess
    ) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/embeddings", json={"input": ["a", "b"], "dimensions": 17})

        assert answer.status_code == 400
        assert "vectors have 16" in answer.json()["error"]["message"]


class TestGivenEchoes:
    def test_when_a_prompt_is_echoed_with_logprobs_then_all_its_tokens_have_some(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().completions.create(model=NULL, prompt="tea", echo=True, logprobs=2, max_tokens=0)

        [choice] = answer.choices
        logprobs = choice.logprobs
        assert logprobs is not None
        assert (choice.text, choice.finish_reason) == ("tea", "length")
        assert logprobs.tokens == ["t", "e", "a"]
        assert logprobs.text_offset == [0, 1, 2]
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == [-math.log(32)] * 2
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)

    def test_when_it_is_continued_then_the_continuation_follows(self, gateway: GatewayProcess) -> None:
        plain, echoed = (
            gateway.client()
            .completions.create(model=NULL, prompt=[116, 101, 97], seed=1, max_tokens=4, logprobs=1, echo=is_echoed)
            .choices[0]
            for is_echoed in (False, True)
        )

        assert echoed.text == "tea" + plain.text
        assert echoed.logprobs is not None
        assert plain.logprobs is not None
        assert echoed.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6]
        assert (echoed.logprobs.token_logprobs or [])[3:] == plain.logprobs.token_logprobs

    def test_when_no_logprobs_are_asked_then_only_the_text_is_echoed(self, gateway: GatewayProcess) -> None:
        answer = gateway.client().completions.create(model=NULL, prompt="tea", echo=True, n=2, max_tokens=3, seed=3)

        assert all(choice.text.startswith("tea") and choice.logprobs is None for choice in answer.choices)

    def test_when_prompt_logprobs_are_asked_then_they_have_vllms_form(self, gateway: GatewayProcess) -> None:
        body = {"model": NULL, "prompt": "tea", "prompt_logprobs": 1, "max_tokens": 2}

        [choice] = posted(gateway, "/v1/completions", **body)["choices"]

        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert others[1]["97"] == {"logprob": -math.log(32), "rank": None, "decoded_token": "a"}
        assert {one["rank"] for one in others[1].values()} == {1, None}

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
            ({"echo": True, "stream": True}, "echo"),
            ({"echo": "yes"}, "echo"),
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ],
    )
    def test_when_they_contradict_another_option_then_it_is_400(
        self, gateway: GatewayProcess, body: dict[str, Any], param: str
    ) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/completions", json={"prompt": "tea", **body})

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


class TestGivenDocuments:
    def test_when_they_are_ranked_then_the_most_relevant_is_first(self, gateway: GatewayProcess) -> None:
        documents: list[str | dict[str, str]] = [*TEXTS, {"text": "four"}]

        answer = posted(gateway, "/v1/rerank", model=NULL, query="tea", documents=documents, top_n=3)

        scores: list[float] = [one["relevance_score"] for one in answer["results"]]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert all(0 < score < 1 for score in scores)
        texts: list[str] = [*TEXTS, "four"]
        found: list[str] = [one["document"]["text"] for one in answer["results"]]
        assert found == [texts[int(one["index"])] for one in answer["results"]]
        assert answer["usage"]["total_tokens"] == sum(len("tea" + text) for text in [*TEXTS, "four"])

    def test_when_they_are_not_wanted_back_then_only_their_places_are_returned(self, gateway: GatewayProcess) -> None:
        answer = posted(gateway, "/v1/rerank", query="tea", documents=TEXTS, return_documents=False)

        assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2]
        assert all(one.keys() == {"index", "relevance_score"} for one in answer["results"])

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"query": ""}, "query"),
            ({"documents": []}, "documents"),
            ({"documents": ["a", 1]}, "documents"),
            ({"top_n": 0}, "top_n"),
            ({"return_documents": "no"}, "return_documents"),
            ({"echo": True}, "echo"),
        ],
    )
    def test_when_a_value_is_wrong_then_it_is_400_and_names_it(
        self, gateway: GatewayProcess, change: dict[str, Any], param: str
    ) -> None:
        with gateway.http() as http:
            answer = http.post("/v1/rerank", json={"query": "a", "documents": ["b"], **change})

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


class TestGivenWorkersThatAreKilled:
    def test_when_jobs_go_on_elsewhere_then_their_vectors_are_the_same(self, tmp_path: Path) -> None:
        texts = [f"text {number} " * (1 + number % 40) for number in range(300)]
        with redis_server("valkey") as server, worker_pool(server.url, tmp_path) as workers:
            # Twenty seconds for all, so that it is killed in time on a busy machine.
            [first] = workers.start_all(1, MODEL="null?token_s=0.0005")
            with Producer(server.url) as producer:
                jobs = [producer.submit(text, embed=True) for text in texts]
                producer.result(jobs[20])
                first.kill()
                num_done = len(list(producer.results(jobs, is_waiting=False)))
                workers.start_all(1, MODEL=SLOW)
                outcomes = {outcome.job_id: outcome for outcome in producer.results(jobs)}
                calm = producer.embed(texts)

        results = [outcomes[job.id].result for job in jobs]
        assert [result.embedding for result in results if result is not None] == calm
        assert num_done < len(jobs)


class TestGivenTheProducer:
    def test_when_texts_are_embedded_then_the_vectors_are_those_of_the_gateway(
        self, queue_server: RedisServer, gateway: GatewayProcess
    ) -> None:
        with Producer(queue_server.url) as producer:
            vectors = producer.embed(TEXTS)
            [cut] = producer.embed(["one"], dimensions=3)

        assert vectors == [vector(gateway, text) for text in TEXTS]
        assert len(cut) == 3

    def test_when_one_text_is_wrong_then_it_is_named_and_nothing_is_submitted(self, queue_server: RedisServer) -> None:
        with Producer(queue_server.url) as producer, queue_server.client() as client:
            before = client.dbsize()

            with pytest.raises(InvalidJob, match=r"texts\[1\]: the prompt is empty"):
                producer.embed(["one", "", "three"])
            with pytest.raises(InvalidJob, match="must be a list"):
                producer.embed("one")

            assert client.dbsize() == before

    def test_when_there_are_none_then_there_are_no_vectors(self, queue_server: RedisServer) -> None:
        with Producer(queue_server.url) as producer:
            assert producer.embed([]) == []

    def test_when_options_contradict_it_then_the_job_is_refused(self, queue_server: RedisServer) -> None:
        with Producer(queue_server.url) as producer:
            with pytest.raises(InvalidJob, match="max_tokens"):
                producer.submit("a", embed=True, max_tokens=5)
            with pytest.raises(InvalidJob, match="embed"):
                producer.submit("a", embed=True, logprobs=1)
            with pytest.raises(InvalidJob, match="structured"):
                producer.submit("a", embed=True, structured={"regex": "a"})
            with pytest.raises(InvalidJob, match="dimensions"):
                producer.submit("a", dimensions=3)


class TestGivenAQueueThatRefusesOneOfManyTexts:
    """Without a worker, so that the others wait."""

    def test_when_they_are_embedded_then_the_others_are_cancelled(self, valkey: RedisServer) -> None:
        with Producer(valkey.url) as producer:
            producer.configure(QueueSettings(max_waiting_jobs=2))

            with pytest.raises(QueueFull):
                producer.embed(TEXTS)

            assert [view.waiting_jobs for view in producer.queue()] == [0]

    def test_when_a_job_was_there_before_then_it_goes_on(self, valkey: RedisServer) -> None:
        with Producer(valkey.url) as producer:
            first = producer.submit("one", embed=True, idempotency_key="mine")

            with pytest.raises(IdempotencyConflict):
                producer.embed(["one", "two"], idempotency_key="mine")

            assert producer.status(first).state == "queued"


class TestGivenAWorkerThatFailsOneOfManyTexts:
    def test_when_they_are_embedded_then_its_error_is_raised_and_the_others_end(
        self, queue_server: RedisServer, gateway: GatewayProcess
    ) -> None:
        assert gateway
        with Producer(queue_server.url) as producer:
            with pytest.raises(JobFailed) as raised:
                producer.embed(["one", "word " * 20_000, *TEXTS])

            assert raised.value.code == "prompt_too_long"
            assert len(producer.embed(TEXTS)) == 3


@pytest.mark.slow
class TestGivenTheSmallModel:
    def test_when_its_job_needs_a_head_that_it_lacks_then_it_is_refused(self, small: GatewayProcess) -> None:
        small.client().embeddings.create(model=SMALL_MODEL.name, input="until a worker has started")

        with small.http() as http:
            answer = http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})

        assert answer.status_code == 400
        assert "classification" in answer.json()["error"]["message"]

    def test_when_a_prompt_is_echoed_then_its_text_is_the_prompt(self, small: GatewayProcess) -> None:
        prompt = "The cat, größer ☃, sat."

        answer = small.client().completions.create(
            model=SMALL_MODEL.name, prompt=prompt, echo=True, logprobs=1, max_tokens=0
        )

        [choice] = answer.choices
        assert choice.text == prompt
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens if answer.usage else 0

    def test_when_texts_are_alike_then_their_vectors_are_nearer(self, small: GatewayProcess) -> None:
        texts = ["The cat sat on the mat.", "The cat sat on a mat.", "def f(x): return x + 1"]

        data = small.client().embeddings.create(model=SMALL_MODEL.name, input=texts).data

        first, second, other = (one.embedding for one in data)
        alike, unlike = product(first, second), product(first, other)
        assert unlike < alike < 1


class TestGivenAChat:
    def test_when_it_asks_for_an_echo_then_it_is_refused(self, gateway: GatewayProcess) -> None:
        with pytest.raises(openai.BadRequestError):
            gateway.client().chat.completions.create(
                model=NULL, messages=[{"role": "user", "content": "a"}], extra_body={"echo": True}
            )
