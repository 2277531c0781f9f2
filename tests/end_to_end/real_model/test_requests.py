"""What clients may ask of a real model: chats, batches, cancellation, deadlines, classes."""

from datetime import UTC, datetime, timedelta

import pytest

from sluice.protocol.states import JobState
from tests.end_to_end.real_model.service import PLACES, Service, chat
from tests.gateway.batches.processes import begun, chat_line, encoded, lines_of, until
from tests.integration.jobs import num_on_channel

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]

CAPITAL = "What is the capital of France?"
LONG = {"max_tokens": 800, "ignore_eos": True}


class TestGivenOpenaisClient:
    def test_when_it_chats_then_the_stream_is_the_whole_answer_and_makes_sense(self, service: Service) -> None:
        whole = service.ask(CAPITAL, temperature=0)
        streamed = service.ask_in_pieces(CAPITAL, temperature=0)

        assert "Paris" in whole
        assert streamed == whole

    def test_when_it_repeats_a_seed_then_the_answer_is_the_same(self, service: Service) -> None:
        first, again, other = [service.ask("Tell me a story.", seed=seed, temperature=0.9) for seed in (3, 3, 4)]

        assert first == again != other

    def test_when_it_has_a_batch_then_each_line_has_the_answer_of_a_job(
        self, service: Service, calm: list[str]
    ) -> None:
        texts = [f"Write a sentence about the number {number}." for number in range(12)]
        lines = [
            chat_line(
                f"c-{number}", model=service.model, messages=[{"role": "user", "content": text}], max_tokens=40,
                temperature=0,
            )
            for number, text in enumerate(texts)
        ]  # fmt: skip

        batch = until(service.openai, begun(service.openai, encoded(lines)), patience_s=120)

        assert batch.status == "completed"
        answers = {
            line["custom_id"]: line["response"]["body"] for line in lines_of(service.openai, batch.output_file_id)
        }
        found = [answers[f"c-{number}"]["choices"][0]["message"]["content"] for number in range(12)]
        assert found == calm[:12]


class TestGivenARunningJob:
    def test_when_it_is_cancelled_then_it_ends_amid_its_answer(self, service: Service) -> None:
        [job_id] = service.submit([chat("Tell me a long story.", **LONG)])
        service.wait_until_they_speak([job_id], 5)

        service.producer.cancel(job_id)
        service.wait_until(lambda: service.producer.status(job_id).state.is_terminal, "it has ended")

        assert service.producer.status(job_id).state is JobState.CANCELLED
        assert num_on_channel(service.client, job_id) < LONG["max_tokens"]

    def test_when_its_deadline_passes_then_it_expires(self, service: Service) -> None:
        deadline = datetime.now(UTC) + timedelta(seconds=2)

        [job_id] = service.submit([chat("Tell me a long story.", **LONG, deadline=deadline)])
        service.wait_until_they_speak([job_id])
        service.wait_until(lambda: service.producer.status(job_id).state.is_terminal, "it has ended")

        assert service.producer.status(job_id).state is JobState.EXPIRED
        assert num_on_channel(service.client, job_id) < LONG["max_tokens"]


class TestGivenFullWorkers:
    def test_when_an_interactive_job_comes_then_it_interrupts_and_they_go_on_exactly(self, service: Service) -> None:
        batch = service.submit([chat("Tell me about rivers.", max_tokens=100, ignore_eos=True)] * (2 * PLACES + 4))
        service.wait_until_they_speak(batch[: 2 * PLACES])

        [urgent] = service.submit([chat(CAPITAL, priority=9)])
        answer = service.texts([urgent])
        states = [service.producer.status(one).state for one in batch]

        assert "Paris" in answer[0]
        assert JobState.DONE not in states
        texts = service.texts(batch)
        assert set(texts) == {texts[0]}
        service.check_streams(batch, texts)
