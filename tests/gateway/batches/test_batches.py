"""Batches by the stock client, through a real gateway, queue, worker and `worker callbacks`."""

import openai
import pytest

from tests.gateway.batches.processes import ENDPOINT, begun, ids_of, lines_of, numbered, until


class TestGivenAFileOfValidRequests:
    def test_when_its_batch_ends_then_each_has_its_line(self, client: openai.OpenAI) -> None:
        batch = begun(client, numbered(30), metadata={"team": "search"})

        found = until(client, batch)

        assert found.status == "completed"
        counts = found.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
        assert found.error_file_id is None
        assert found.metadata == {"team": "search"}
        assert found.model == "null"
        assert found.completed_at is not None
        assert ids_of(client, found) == sorted(f"c-{number}" for number in range(30))
        line = lines_of(client, found.output_file_id)[0]
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
        assert line["response"]["body"]["usage"]["completion_tokens"] == 4


class TestGivenAFileWithAPromptThatIsTooLong:
    def test_when_its_batch_ends_then_its_error_is_that_of_the_routes(self, client: openai.OpenAI) -> None:
        messages = [{"role": "user", "content": "word " * 20_000}]

        found = until(client, begun(client, numbered(1, messages=messages)))

        [line] = lines_of(client, found.error_file_id)
        assert line["response"]["status_code"] == 400
        error = line["response"]["body"]["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


class TestGivenAFileThatAsksForMoreTokensThanTheContextHas:
    def test_when_its_batch_ends_then_its_error_is_that_of_the_routes(self, client: openai.OpenAI) -> None:
        found = until(client, begun(client, numbered(1, max_tokens=100_000)))

        assert found.output_file_id is None
        [line] = lines_of(client, found.error_file_id)
        assert line["response"]["status_code"] == 400
        error = line["response"]["body"]["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "max_tokens (100000)" in error["message"]


class TestGivenAFileThatBeginsWithABlankLine:
    def test_when_its_batch_is_created_then_the_model_is_known(self, client: openai.OpenAI) -> None:
        batch = begun(client, b"\n" + numbered(1))

        found = until(client, batch)

        assert batch.model == "null"
        assert found.status == "completed"


class TestGivenAFileWithABadLine:
    def test_when_its_batch_is_checked_then_it_fails_and_names_the_line(self, client: openai.OpenAI) -> None:
        batch = begun(client, numbered(2) + b"{not JSON}\n")

        found = until(client, batch)

        assert found.status == "failed"
        assert found.errors is not None
        assert found.errors.data is not None
        assert [(error.line, error.code) for error in found.errors.data] == [(3, "invalid_json")]
        assert found.output_file_id is None


class TestGivenAFileForAModelThatIsNotServed:
    def test_when_its_batch_is_created_then_the_answer_names_the_file(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="the first line of the file: the model 'other'") as raised:
            begun(client, numbered(1, model="other"))

        assert (raised.value.param, raised.value.code) == ("input_file_id", "model_not_found")


class TestGivenABatchInProgress:
    def test_when_it_is_cancelled_then_what_ended_is_kept(self, client: openai.OpenAI) -> None:
        batch = begun(client, numbered(40, max_tokens=2000))
        until(client, batch, "in_progress")

        assert client.batches.cancel(batch.id).status == "cancelling"
        found = until(client, batch)

        assert found.status == "cancelled"
        assert ids_of(client, found) == sorted(f"c-{number}" for number in range(40))
        assert all(line["error"]["code"] == "batch_cancelled" for line in lines_of(client, found.error_file_id))
        assert found.endpoint == ENDPOINT
