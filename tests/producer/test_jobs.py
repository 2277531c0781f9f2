"""What callers hand over becomes a job, or a sentence that says what is wrong with it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.producer import Producer
from sluice.producer.errors import InvalidJob, InvalidPrompt, ProducerError
from sluice.protocol.calls import FromNow, NewJob
from sluice.protocol.job_ids import split_job_id
from sluice.protocol.jobs import Job, JobEncoder, Options, job, only_prompt, partition_of, template
from sluice.protocol.openai_format.requests import CHAT, RequestRefused, read_request
from sluice.protocol.wire import JobId, Message, decode_prompt, decode_spec


def made(prompt: Any = "hello", **options: Any) -> NewJob:  # Any: tests hand over what is wrong, too
    """One job."""
    return template(Options(**options)).new_job(prompt)


class TestGivenEachKindOfPrompt:
    def test_when_it_is_text_then_its_bytes_are_counted_for_the_estimate(self) -> None:
        new = made("Grüße")

        assert decode_prompt(new.payload) == "Grüße"
        assert (new.prompt_bytes, new.prompt_tokens) == (7, None)

    def test_when_it_is_messages_then_dictionaries_and_values_are_the_same(self) -> None:
        plain = made([{"role": "user", "content": "hi"}])
        typed = made((Message(role="user", content="hi"),))

        assert plain.payload == typed.payload
        assert decode_prompt(plain.payload) == (Message(role="user", content="hi"),)
        assert (plain.prompt_bytes, plain.prompt_tokens) == (2, None)

    def test_when_a_content_has_text_parts_then_they_are_joined(self) -> None:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]

        new = made([{"role": "user", "content": parts}])

        assert decode_prompt(new.payload) == (Message(role="user", content="hi"),)

    def test_when_it_is_token_ids_then_their_number_is_exact(self) -> None:
        new = made([5, 6, 7])

        assert decode_prompt(new.payload) == (5, 6, 7)
        assert new.prompt_tokens == 3

    @pytest.mark.parametrize(
        "prompt",
        [
            "",
            [],
            "\ud800",
            [-1],
            [1.5],
            [True],
            [2**31],
            b"bytes",
            7,
            None,
            [{"role": "robot", "content": "hi"}],
            [{"role": "user"}],
            [{"role": "user", "content": "hi", "tool_calls": ["x"]}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": ["hi"]}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": "hi"}, 3],
            [3, {"role": "user", "content": "hi"}],
            "x" * (4 * 1024 * 1024),
        ],
        ids=lambda prompt: repr(prompt)[:40],
    )
    def test_when_it_is_wrong_then_it_is_an_invalid_job(self, prompt: object) -> None:
        with pytest.raises(InvalidJob):
            made(prompt)

    def test_when_none_or_two_are_given_then_the_error_counts_them(self) -> None:
        with pytest.raises(InvalidJob, match="not 0 of them"):
            only_prompt(None, None, None)
        with pytest.raises(InvalidJob, match="not 2 of them"):
            only_prompt("text", None, [1])


class TestGivenOptions:
    def test_when_they_are_complete_then_the_spec_and_the_queue_get_theirs(self) -> None:
        deadline = datetime(2031, 1, 1, tzinfo=UTC)

        new = made(
            max_tokens=7, temperature=0.5, stop="END", stop_token_ids=[3], n=2, logprobs=4, logit_bias={5: -1.0},
            seed=2**64 - 1, priority=9, tenant="acme", ttl_s=1.5, deadline=deadline, idempotency_key="k", batch="b",
            metadata={"user": "7"}, traceparent="00-1-2-01", callback_url="https://example.org/hook", stream=False,
            model="m", add_special_tokens=False,
        )  # fmt: skip

        spec = decode_spec(new.spec)
        assert (spec.options.max_tokens, spec.options.stop, spec.options.stop_token_ids) == (7, ("END",), (3,))
        assert (spec.options.n, spec.options.logprobs, spec.options.logit_bias) == (2, 4, {5: -1.0})
        assert (spec.model, spec.stream, spec.metadata, spec.batch) == ("m", False, {"user": "7"}, "b")
        assert (new.seed, new.priority, new.ttl_ms, new.deadline_ms) == (2**64 - 1, 9, 1500, 1924992000000)
        assert (new.max_tokens, new.choices, new.idempotency_key, new.wants_callback) == (7, 2, "k", True)
        assert split_job_id(new.id)[1] == "acme"

    def test_when_a_time_is_from_now_then_the_wall_clock_does_not_matter(self) -> None:
        new = made(not_before=timedelta(minutes=1))

        assert isinstance(new.not_before_ms, FromNow)
        assert 59_000 < new.not_before_ms.left_ms() <= 60_000

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (
                {"temprature": 1.0},
                "unknown option 'temprature'. Did you mean 'temperature'\\? Options are: add_special",
            ),
            ({"xyzzy": 1.0}, "unknown option 'xyzzy'. Options are: add_special_tokens, "),
            ({"temperature": -1}, "temperature must be"),
            ({"temperature": "hot"}, "temperature must be"),
            ({"temperature": float("nan")}, "temperature must be"),
            ({"top_p": 0}, "top_p must be"),
            ({"max_tokens": 0}, "max_tokens must be"),
            ({"max_tokens": 2.5}, "max_tokens must be"),
            ({"n": 65}, "n must be"),
            ({"stop": ["a", ""]}, "stop must not have an empty string"),
            ({"stop": 5}, "stop must be text or a list of texts"),
            ({"seed": -1}, "seed must be a whole number in"),
            ({"seed": 2**64}, "seed must be"),
            ({"seed": True}, "seed must be"),
            ({"priority": 10}, "priority must be a whole number in \\[0, 9\\]"),
            ({"tenant": "Acme!"}, "tenant"),
            ({"ttl_s": 0}, "ttl_s must be"),
            ({"deadline": datetime(1, 1, 2, tzinfo=UTC)}, "deadline must be after 1970"),
            ({"deadline": datetime(2031, 1, 1)}, "deadline must be a datetime with its time zone"),  # noqa: DTZ001
            ({"not_before": 5}, "not_before must be"),
            ({"idempotency_key": ""}, "idempotency_key must be"),
            ({"idempotency_key": 5}, "idempotency_key must be"),
            ({"metadata": {"k": "v" * 513}}, "metadata value"),
            ({"metadata": {str(i): "" for i in range(17)}}, "metadata may have 16 pairs"),
            ({"callback_url": "ftp://x"}, "callback_url"),
            ({"batch": "a b"}, "batch must be"),
            ({"job_id": "nonsense"}, "not a job id"),
            ({"job_id": "7.default.a"}, "partition 7; this queue has 1"),
            ({"job_id": "00.default.a"}, "not a job id"),
            ({"job_id": "\N{ARABIC-INDIC DIGIT ZERO}.default.a"}, "not a job id"),
            ({"temperature": 10**400}, "temperature must be a finite number"),
            ({"job_id": "0.acme.1"}, "another tenant"),
        ],
        ids=str,
    )
    def test_when_a_value_is_wrong_then_the_sentence_names_it(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InvalidJob, match=sentence) as caught:
            made(**options)

        assert isinstance(caught.value, ProducerError)
        assert isinstance(caught.value, ValueError)

    def test_when_a_number_has_too_many_digits_to_print_then_it_is_refused_too(self) -> None:
        with pytest.raises(InvalidJob, match="cannot be read"):
            made(max_tokens=10**5000)


class TestGivenOptionsThatWereCheckedBefore:
    def test_when_equal_ones_of_another_type_come_then_they_are_refused(self) -> None:
        template(Options(max_tokens=1))
        wrong: Any = {"max_tokens": True}

        with pytest.raises(InvalidJob, match="max_tokens"):
            template(wrong)

    def test_when_they_come_again_then_the_job_is_another_one(self) -> None:
        first, second = (template(Options(max_tokens=1)).new_job("hi") for _ in range(2))

        assert (first.spec, first.digest) == (second.spec, second.digest)
        assert first.id != second.id
        assert first.seed != second.seed

    def test_when_a_time_is_relative_to_now_then_it_is_counted_from_each_submit(self) -> None:
        times = [template(Options(not_before=timedelta(seconds=5))).not_before_ms for _ in range(2)]

        first, second = (time for time in times if isinstance(time, FromNow))
        assert first.since_s < second.since_s


class TestGivenABadMessage:
    def test_when_it_lacks_its_role_then_the_sentence_says_so(self) -> None:
        with pytest.raises(InvalidJob, match="got content; role is missing"):
            template(Options()).new_job([{"content": "hello"}])

    @pytest.mark.parametrize(
        ("message", "end"), [({"role": "bot", "content": "hi"}, 'got "bot"'), ({"content": "hi"}, "it is missing")]
    )
    def test_when_a_chat_names_no_role_that_is_served_then_those_are_named(
        self, message: dict[str, str], end: str
    ) -> None:
        with pytest.raises(RequestRefused, match=f"one of user, assistant, system, developer, tool; {end}") as raised:
            read_request(CHAT, {"messages": [message]})

        assert raised.value.param == "messages[0].role"


class TestGivenTheSameQuestionTwice:
    def test_when_nothing_is_said_then_id_and_seed_are_drawn_and_the_digest_is_the_same(self) -> None:
        one, two = made(), made()

        assert one.id != two.id
        assert one.seed != two.seed
        assert one.digest == two.digest

    def test_when_only_trace_or_streaming_differs_then_the_digest_is_the_same(self) -> None:
        assert made(traceparent="00-1-2-01").digest == made(stream=False).digest == made().digest

    @pytest.mark.parametrize(
        "other", [{"max_tokens": 3}, {"seed": 3}, {"model": "m"}, {"metadata": {"a": "b"}}], ids=str
    )
    def test_when_something_else_differs_then_so_does_the_digest(self, other: dict[str, Any]) -> None:
        assert made(**other).digest != made().digest

    def test_when_the_prompt_differs_then_so_does_the_digest(self) -> None:
        assert made("hello!").digest != made("hello").digest


class TestGivenPartitions:
    @given(key=st.text(min_size=1, max_size=20), partitions=st.integers(1, 16))
    def test_when_the_key_is_the_same_then_so_is_the_partition(self, key: str, partitions: int) -> None:
        jobs = [template(Options(idempotency_key=key)).new_job("hi", partitions=partitions) for _ in range(3)]

        found = {split_job_id(new.id)[0] for new in jobs}

        assert found == {partition_of(key, partitions)}
        assert max(found) < partitions

    def test_when_there_are_many_jobs_then_every_partition_gets_its_share(self) -> None:
        shared = template(Options())

        counts = [0] * 4
        for _ in range(2000):
            counts[split_job_id(shared.new_job("hi", partitions=4).id)[0]] += 1

        assert min(counts) > 400


class TestGivenAJobEncoder:
    def test_when_a_job_has_options_of_its_own_then_they_come_on_top_of_the_shared(self) -> None:
        encoder = JobEncoder(Options(max_tokens=5, tenant="acme"), partitions=1)

        own, _ = encoder.prepare(job("hi", max_tokens=6))

        assert isinstance(own, NewJob)
        assert (own.max_tokens, split_job_id(own.id)[1]) == (6, "acme")

    def test_when_one_is_wrong_then_its_error_stands_in_its_place(self) -> None:
        encoder = JobEncoder(Options(), partitions=1)

        answers = [encoder.prepare(item)[0] for item in ("good", "", Job("bad", Options(top_p=9)))]

        assert [type(answer) for answer in answers] == [NewJob, InvalidPrompt, InvalidJob]

    def test_when_the_caller_chose_the_id_then_it_is_kept_and_said(self) -> None:
        chosen = JobId("0.default.mine")

        new, is_chosen = JobEncoder(Options(), partitions=1).prepare(job("hi", job_id=chosen))

        assert isinstance(new, NewJob)
        assert (new.id, is_chosen) == (chosen, True)


BAD_CALLBACK_URLS = [
    "http://[::1",
    "http://",
    "https:///path",
    "ftp://host/",
    "host/path",
    "http://host:port/",
    "http://host:70000/",
    "http://host:0/",
    "http://ann:word@host/",
    "http://a b/",
    "http://host/\r\nX: y",
    "http://a..b/",
    f"http://{'a' * 64}.example/",
    "",
]


class TestGivenACallbackUrlThatCannotBeCalled:
    @pytest.mark.parametrize("url", BAD_CALLBACK_URLS)
    def test_when_a_job_names_it_then_it_is_refused(self, producer: Producer, url: str) -> None:
        with pytest.raises(InvalidJob, match="callback_url must"):
            producer.submit("hello", callback_url=url)

    @pytest.mark.parametrize("url", BAD_CALLBACK_URLS)
    def test_when_a_batch_is_closed_with_it_then_it_is_refused(self, producer: Producer, url: str) -> None:
        producer.submit("hello", batch="night")

        with pytest.raises(InvalidJob, match="callback_url must"):
            producer.close_batch("night", callback_url=url)

    @pytest.mark.parametrize(
        "url", ["http://[::1]:80/a", "https://example.com", "http://bücher.example/ä?b=c#d", "http://10.0.0.1:8080/"]
    )
    def test_when_it_can_then_it_is_accepted(self, producer: Producer, url: str) -> None:
        assert producer.submit("hello", callback_url=url).id
