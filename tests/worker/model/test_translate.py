"""Job to request: prompts of all kinds, chat templates, and what is refused in words a producer can read."""

import pytest

from sluice.engine.errors import PromptTooLong, RequestRejected
from sluice.engine.request import Request
from sluice.protocol.calls import LeasedJob
from sluice.protocol.keys import QueueKeys
from sluice.protocol.wire import JobId, JobOptions, JobSpec, Message, Prompt, encode_prompt, encode_spec
from sluice.worker.errors import ConfigError, JobRejected
from sluice.worker.jobs.channel import ChannelOutput
from sluice.worker.jobs.held_job import HeldJob
from sluice.worker.jobs.leases import Leases
from sluice.worker.model.chat_template import compile_template
from sluice.worker.model.translate import Translator, code_of, read_spec, room_of

SUBMITTED_MS = 1_700_000_000_000
"""2023-11-14 22:13:20 UTC."""


def leased(
    prompt: Prompt, *, spec: JobSpec | None = None, choices: int = 1, published: tuple[int, ...] = (0,)
) -> LeasedJob:
    return LeasedJob(
        id=JobId("0.acme.abc"),
        epoch=3,
        attempt=1,
        priority=2,
        spec=encode_spec(spec or JobSpec()),
        payload=encode_prompt(prompt),
        seed=99,
        choices=choices,
        submitted_ms=SUBMITTED_MS,
        pulled_ms=SUBMITTED_MS,
        deadline_ms=None,
        prompt_tokens=10,
        published=published,
        ended=(False,) * len(published),
        fingerprint=None,
        fits=True,
    )


def held(prompt: Prompt, *, spec: JobSpec | None = None) -> HeldJob:
    job = leased(prompt, spec=spec)
    return Leases().new_job(job, QueueKeys("q"), read_spec(job.spec))


def translator(template: str | None = None) -> Translator:
    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(letter) for letter in text]

    def validate(request: Request) -> None:
        if len(request.prompt_token_ids) > 100:
            raise PromptTooLong("prompt is 101 tokens; this model reads 100")

    compiled = compile_template(template, {"bos_token": "<s>"}) if template is not None else None
    return Translator(encode=encode, template=compiled, validate=validate, model="m")


class TestGivenAPromptOfEachKind:
    def test_when_it_is_text_then_it_gets_special_tokens_unless_disabled(self) -> None:
        assert translator().translate(held("a"))[0].prompt_token_ids == (1, 97)
        bare = held("a", spec=JobSpec(add_special_tokens=False))
        assert translator().translate(bare)[0].prompt_token_ids == (97,)

    def test_when_it_is_token_ids_then_they_pass_through(self) -> None:
        request = translator().translate(held((5, 6, 7)))[0]

        assert (request.prompt_token_ids, request.is_chat) == ((5, 6, 7), False)

    def test_when_it_is_a_chat_then_the_template_writes_all_of_it(self) -> None:
        template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        chat = (Message(role="system", content="x"), Message(role="user", content="y"))

        request = translator(template).translate(held(chat))[0]

        assert "".join(map(chr, request.prompt_token_ids)) == "<s>[system]x[user]y"
        assert request.is_chat

    @pytest.mark.parametrize(
        ("template", "expected"), [("[{{ messages[0].role }}]{{ messages[0].content }}", "[user]y"), (None, "\x01y")]
    )
    def test_when_it_is_text_as_a_chat_then_a_model_with_a_template_uses_it(
        self, template: str | None, expected: str
    ) -> None:
        request = translator(template).translate(held("y", spec=JobSpec(as_chat=True)))[0]

        assert "".join(map(chr, request.prompt_token_ids)) == expected
        assert request.is_chat == (template is not None)

    def test_when_translated_then_identity_seed_priority_and_tenant_travel(self) -> None:
        spec = JobSpec(options=JobOptions(max_tokens=5, temperature=0.5, stop=("x",), logit_bias={3: 1.0}))

        request = translator().translate(held("a", spec=spec))[0]

        assert request.id.startswith("0.acme.abc#3.")
        assert (request.priority, request.cache_salt) == (2, "acme")
        sampling = request.sampling
        assert (sampling.seed, sampling.max_tokens, sampling.temperature) == (99, 5, 0.5)
        assert (sampling.stop, dict(sampling.logit_bias)) == (("x",), {3: 1.0})
        assert request.progress == ()

    def test_when_an_earlier_attempt_published_then_it_is_replayed(self) -> None:
        job = held("a")
        job.restore(0, ChannelOutput(token_ids=[7, 8], published=2))

        (progress,) = translator().translate(job)[0].progress

        assert (progress.token_ids, progress.is_finished) == ((7, 8), False)


class TestGivenATemplate:
    def test_when_it_asks_for_the_time_then_it_is_when_the_job_was_submitted(self) -> None:
        chat = (Message(role="user", content="y"),)

        request = translator("{{ strftime_now('%Y-%m-%d') }}").translate(held(chat))[0]

        assert "".join(map(chr, request.prompt_token_ids)) == "2023-11-14"

    def test_when_it_uses_what_model_folders_use_then_it_renders(self) -> None:
        template = (
            "{%- for m in messages -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}"
            "{% generation %}{{ m | tojson }}{% endgeneration %}{%- endfor -%}"
        )
        chat = (Message(role="user", content="<é>"), Message(role="user", content="no"))

        request = translator(template).translate(held(chat))[0]

        assert "".join(map(chr, request.prompt_token_ids)) == '{"role": "user", "content": "<é>"}'

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('only users may speak') }}",
            "{{ messages[5].content.upper() }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ 1 // 0 }}",
        ],
    )
    def test_when_it_refuses_or_fails_or_reaches_out_then_only_the_job_fails(self, template: str) -> None:
        with pytest.raises(JobRejected) as caught:
            translator(template).translate(held((Message(role="user", content="y"),)))[0]

        assert caught.value.code == "invalid_request"

    def test_when_it_is_not_jinja_then_the_worker_does_not_start(self) -> None:
        with pytest.raises(ConfigError, match="chat template is not valid"):
            compile_template("{% for %}", {})


class TestGivenWhatCannotRun:
    def test_when_the_engine_refuses_then_its_message_and_a_code_are_reported(self) -> None:
        with pytest.raises(JobRejected, match="prompt is 101 tokens") as caught:
            translator().translate(held("x" * 101))[0]

        assert caught.value.code == "prompt_too_long"

    def test_when_there_is_no_template_then_it_says_what_to_send_instead(self) -> None:
        with pytest.raises(JobRejected, match="send text instead") as caught:
            translator().translate(held((Message(role="user", content="y"),)))[0]

        assert caught.value.code == "invalid_request"

    def test_when_another_model_is_asked_for_then_both_names_are_reported(self) -> None:
        with pytest.raises(JobRejected, match="'other'; this queue serves 'm'"):
            translator().translate(held("a", spec=JobSpec(model="other")))[0]

    def test_when_spec_or_prompt_cannot_be_read_then_only_the_job_fails(self) -> None:
        job = leased("a")
        unreadable = Leases().new_job(job, QueueKeys("q"), None)

        with pytest.raises(JobRejected, match="cannot be read"):
            translator().translate(unreadable)[0]

    def test_when_a_rejection_has_no_kind_of_its_own_then_it_has_a_code_still(self) -> None:
        assert code_of(RequestRejected("no")) == "invalid_request"


class TestGivenTheRoomOfAJob:
    def test_when_it_may_say_little_then_it_takes_little(self) -> None:
        short = held("a", spec=JobSpec(options=JobOptions(max_tokens=3)))
        long = held("a", spec=JobSpec(options=JobOptions(max_tokens=3000)))

        assert room_of(short, reserve_tokens=256).kv_tokens == 10 + 3
        assert room_of(long, reserve_tokens=256).kv_tokens == 10 + 256

    def test_when_it_has_choices_some_ended_then_only_open_ones_count(self) -> None:
        job = leased("a", spec=JobSpec(options=JobOptions(max_tokens=50, n=3)), choices=3, published=(10, 50, 0))
        resumed = Leases().new_job(job, QueueKeys("q"), read_spec(job.spec))
        resumed.restore(1, ChannelOutput(published=50, has_end=True))

        room = room_of(resumed, reserve_tokens=45)

        assert room.sequences == 2
        assert room.kv_tokens == 10 + 60 + 40 + 45
