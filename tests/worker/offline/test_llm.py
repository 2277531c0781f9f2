"""Generation without a queue: the service's tokens, in the order of the prompts, whatever becomes of one of them."""

import gc
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import LLM, SamplingParams
from sluice.engine.batch import Batch
from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.executor import Launched
from sluice.engine.request import FinishReason
from sluice.producer.errors import InvalidJob
from sluice.protocol.jobs import PromptLike, as_prompt
from sluice.protocol.outputs.formats import OutputFormat
from sluice.protocol.outputs.parser import OutputParser, joined
from sluice.protocol.wire import JobOptions, JobResult, JobSpec, Message
from sluice.worker.config import WorkerConfig, load_config
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import SMALL_MODEL
from sluice.worker.model.load import load
from sluice.worker.model.loaded_model import LocalModel
from sluice.worker.offline import llm as llm_module
from sluice.worker.offline.outputs import PromptFailed, RequestOutput, StreamOutput
from sluice.worker.offline.runs import OfflinePrompt, Runs
from tests.examples import examples
from tests.integration.jobs import Ask, result_of, submit_all, wait_for_ends
from tests.integration.workers import running_worker
from tests.servers import RedisServer

CHAT = [{"role": "user", "content": "Count from 3 to 9."}]
ASKED: list[tuple[PromptLike, SamplingParams]] = [
    ("Once upon a time", SamplingParams(max_tokens=20, seed=1)),
    ("Once upon a time", SamplingParams(max_tokens=12, seed=2, n=3, logprobs=2)),
    (CHAT, SamplingParams(temperature=0, seed=3)),
    (CHAT, SamplingParams(temperature=0, seed=3, stop="5", logprobs=0)),
    ([5, 6, 7], SamplingParams(max_tokens=9, seed=4, stop_token_ids=[11], frequency_penalty=0.5)),
    ("The sea", SamplingParams(max_tokens=30, seed=5, top_p=0.9, top_k=40, min_tokens=5, ignore_eos=True)),
    ("x" * 100_000, SamplingParams(seed=6)),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The small model."""
    with LLM() as llm:
        yield llm


@pytest.fixture
def null() -> LLM:
    """A model that computes nothing, with three places."""
    return LLM("null", max_num_seqs=3)


def prompts_of(max_tokens: int, *, num: int = 1) -> Iterator[OfflinePrompt]:
    """Prompts of one call, each of which gets `max_tokens` tokens."""
    spec = JobSpec(options=JobOptions(max_tokens=max_tokens, ignore_eos=True))
    return (OfflinePrompt(index=index, prompt="one", spec=spec, seed=1) for index in range(num))


def parts_of(result: JobResult | RequestOutput) -> list[tuple[object, ...]]:
    """What a reader gets for each choice, from the service or without it."""
    choices = result.choices if isinstance(result, JobResult) else result.outputs
    return [
        (
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            [(one.chosen, one.top, one.token, one.offset) for one in choice.logprobs or ()],
        )
        for choice in choices
    ]


class TestGivenTheSmallModel:
    def test_when_the_service_gets_the_same_requests_then_it_gives_the_same(
        self, llm: LLM, valkey: RedisServer
    ) -> None:
        asks = [Ask(prompt=as_prompt(prompt), options=one.options, seed=one.seed or 0) for prompt, one in ASKED[:-1]]
        with valkey.client() as client, running_worker(valkey.url, model__path=str(SMALL_MODEL)):
            job_ids = submit_all(client, asks)
            wait_for_ends(client, job_ids)
            served = [result_of(client, job_id) for job_id in job_ids]

        outputs = llm.generate([prompt for prompt, _ in ASKED], [one for _, one in ASKED])

        assert [parts_of(output) for output in outputs[:-1]] == [parts_of(result) for result in served]
        assert [len(output.prompt_token_ids) for output in outputs[:-1]] == [one.usage.prompt_tokens for one in served]

    def test_when_a_text_is_a_chat_then_the_template_makes_its_prompt(self, llm: LLM) -> None:
        greedy = SamplingParams(temperature=0)
        (asked,) = llm.chat("What is 12 + 30?", greedy)
        one, two = llm.chat([CHAT, [{"role": "user", "content": "What is 12 + 30?"}]], greedy)

        (text,) = llm.generate("What is 12 + 30?", greedy)

        assert asked.text == two.text == "12 + 30 = 42."
        assert one.text == "3, 4, 5, 6, 7, 8, 9."
        assert len(text.prompt_token_ids) < len(asked.prompt_token_ids)

    @pytest.mark.parametrize(
        "message", [CHAT[0], Message(role="user", content="Count from 3 to 9.")], ids=["mapping", "message"]
    )
    def test_when_one_message_is_a_chat_then_it_is_answered(
        self, llm: LLM, message: Message | dict[str, object]
    ) -> None:
        (answer,) = llm.chat(message, SamplingParams(temperature=0))

        assert answer.text == "3, 4, 5, 6, 7, 8, 9."

    def test_when_a_prompt_repeats_an_earlier_one_then_its_blocks_are_cached(self, llm: LLM) -> None:
        prompt = "Once upon a time there was a little fox who lived in the woods near a river. " * 3
        llm.generate(prompt, SamplingParams(max_tokens=1))

        (again,) = llm.generate(prompt, SamplingParams(max_tokens=1))

        assert again.num_cached_tokens >= 16


class TestGivenPromptsOneOfWhichFails:
    @pytest.mark.parametrize(
        ("bad", "code"),
        [
            ("x" * 100_000, "prompt_too_long"),
            ("", "invalid_request"),
            ([10**6], "unknown_token"),
            ([{"role": "nobody", "content": "hi"}], "invalid_request"),
            (3.5, "invalid_request"),
        ],
        ids=["too long", "empty", "unknown token", "unknown role", "no prompt"],
    )
    def test_when_all_are_generated_then_the_others_have_their_outputs(
        self, null: LLM, bad: PromptLike, code: str
    ) -> None:
        alone = null.generate(["one", "two"], SamplingParams(seed=1, n=2))

        first, failed, second = null.generate(["one", bad, "two"], SamplingParams(seed=1, n=2))

        assert [parts_of(first), parts_of(second)] == list(map(parts_of, alone))
        assert failed.error is not None
        assert failed.error.code == code
        assert [one.finish_reason for one in failed.outputs] == ["error", "error"]
        with pytest.raises(PromptFailed):
            _ = failed.text

    def test_when_one_states_more_tokens_than_the_context_has_then_it_alone_is_refused(self, null: LLM) -> None:
        most = [SamplingParams(max_tokens=num_tokens, seed=1) for num_tokens in (4, 100_000, 4)]

        first, refused, second = null.generate(["one", [1, 2], "two"], most)

        assert refused.error is not None
        assert refused.error.code == "request_too_large"
        assert "max_tokens (100000)" in str(refused.error)
        assert [first.error, second.error] == [None, None]

    def test_when_a_step_fails_with_it_then_the_others_have_their_outputs(self) -> None:
        llm = LLM("null?obey_prompts=1")

        first, failed, second = llm.generate(["one", "two [[fail@3]]", "three"], SamplingParams(max_tokens=9))

        assert failed.error is not None
        assert failed.error.code == "engine_error"
        assert [first.error, second.error] == [None, None]
        assert first.text


class TestGivenAnyPrompts:
    @settings(max_examples=examples(25))
    @given(
        asked=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=12),
        places=st.integers(1, 8),
        lengths=st.integers(1, 40),
    )
    def test_when_they_are_streamed_then_the_pieces_make_the_outputs_in_order(
        self, asked: list[tuple[int, int]], places: int, lengths: int
    ) -> None:
        llm = LLM("null", max_num_seqs=places)
        params = [SamplingParams(max_tokens=length, n=n, seed=length) for length, n in asked]
        prompts: list[PromptLike] = [[number + 1] * lengths for number in range(len(asked))]

        outputs = llm.generate(prompts, params)
        pieces = list(llm.stream(prompts, params))

        assert [output.prompt for output in outputs] == prompts
        for place, output in enumerate(outputs):
            own = [piece for piece in pieces if piece.prompt_index == place]
            assert [piece.request_output is not None for piece in own] == [False] * (len(own) - 1) + [True]
            for choice in output.outputs:
                mine = [piece for piece in own if piece.index == choice.index]
                assert "".join(piece.text for piece in mine) == choice.text
                assert tuple(token for piece in mine for token in piece.token_ids) == choice.token_ids
                assert [piece.finish_reason for piece in mine][-1] == choice.finish_reason

    @pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
    def test_when_the_discipline_is_another_then_the_outputs_are_the_same(self, discipline: str, null: LLM) -> None:
        other = LLM("null", max_num_seqs=3, discipline=discipline, batch_window_s=0.001)
        prompts = ["one", "two", "three", "four", "five"]

        outputs = other.generate(prompts, SamplingParams(max_tokens=20, seed=1))

        assert list(map(parts_of, outputs)) == list(
            map(parts_of, null.generate(prompts, SamplingParams(max_tokens=20, seed=1)))
        )


class TestGivenAStreamThatIsHalfRead:
    def test_when_the_reader_leaves_then_its_prompts_are_dropped_before_the_next_step(self) -> None:
        model = load(load_config({}, flags={"model.path": "null"}))
        runs = Runs(model, max_num_seqs=3)
        stream = runs.run(prompts_of(1000, num=2))
        next(stream)
        assert not model.engine.is_idle

        del stream
        gc.collect()
        pieces = list(runs.run(prompts_of(1)))

        assert [piece.finish_reason for piece in pieces] == ["length"]
        assert model.engine.is_idle

    @pytest.mark.parametrize("is_in_step", [True, False], ids=["in a step", "after a step"])
    def test_when_it_is_collected_during_another_call_then_that_has_all_of_its_output(
        self, is_in_step: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load(load_config({}, flags={"model.path": "null"}))
        runs = Runs(model, max_num_seqs=4)
        alone = list(runs.run(prompts_of(5)))
        half_read = runs.run(prompts_of(1000, num=2))
        next(half_read)

        def launch(batch: Batch) -> Launched:
            half_read.close()  # as the garbage collector does, at any instruction
            return real(batch)

        real = model.executor.launch
        if is_in_step:
            monkeypatch.setattr(model.executor, "launch", launch)
        else:
            model.engine.watch(lambda _iteration: half_read.close())
        pieces = list(runs.run(prompts_of(5)))

        assert pieces == alone
        model.engine.check_invariants()
        assert model.engine.is_idle

    def test_when_another_call_runs_meanwhile_then_both_have_all_of_their_output(self, null: LLM) -> None:
        params = SamplingParams(max_tokens=20, seed=1)
        (alone,) = null.generate("one", params)
        pieces: list[StreamOutput] = []
        others: list[RequestOutput] = []

        for piece in null.stream("one", params):
            pieces.append(piece)
            others += null.generate("two", params) if len(others) < 2 else []

        assert pieces[-1].request_output is not None
        assert parts_of(pieces[-1].request_output) == parts_of(alone)
        assert "".join(piece.text for piece in pieces) == alone.text
        assert parts_of(others[0]) == parts_of(others[1])

    def test_when_prompts_never_end_then_only_those_with_room_are_read(self, null: LLM) -> None:
        read: list[int] = []
        prompts = (f"prompt {read.append(number) or number}" for number in count())

        stream = null.stream(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
        done = [piece for piece, _ in zip(stream, range(100), strict=False)]

        assert len(done) == 100
        assert len(read) <= 100 / 10 + 3 * 2 * 2


class TestGivenACallThatIsInterrupted:
    """By Ctrl-C, at each third function that it calls."""

    def test_when_the_next_call_runs_then_it_has_all_of_its_output(self) -> None:
        model = load(load_config({}, flags={"model.path": "null"}))
        runs = Runs(model, max_num_seqs=4)
        alone = list(runs.run(prompts_of(2)))
        places = 0

        for place in count(step=3):
            try:
                with interrupted_at(place):
                    list(runs.run(prompts_of(2)))
            except KeyboardInterrupt:
                places += 1
            else:
                break
            assert list(runs.run(prompts_of(2))) == alone, f"after an interrupt at call {place}"

        assert places > 30
        model.engine.check_invariants()
        assert model.engine.is_idle


@contextmanager
def interrupted_at(place: int) -> Generator[None]:
    """Send SIGINT to this thread when it has called `place` functions."""
    calls = count()

    def on_event(_frame: object, event: str, _argument: object) -> None:
        if event == "call" and next(calls) == place:
            signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(before)


class TestGivenWrongArguments:
    def test_when_the_numbers_of_prompts_and_parameters_differ_then_nothing_runs(self, null: LLM) -> None:
        with pytest.raises(ValueError, match="3 prompts need as many sampling_params, got 1"):
            null.generate(["a", "b", "c"], [SamplingParams()])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": -1.0}, "temperature must be in"),
            ({"max_token": 3}, "Did you mean 'max_tokens'"),
            ({"seed": -1}, "seed must be a whole number"),
            ({"n": 0}, "n must be in"),
        ],
        ids=str,
    )
    def test_when_an_option_is_wrong_then_it_is_named(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidJob, match=message):
            SamplingParams(**options)  # pyright: ignore[reportArgumentType]  # wrong on purpose

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"max_num_sequences": 3}, "max_num_sequences: .* Did you mean 'max_num_seqs'"),
            ({"max_num_seqs": "many"}, "max_num_seqs: expected sequences as a whole number"),
            ({"processes": 2}, "processes: not a setting"),
            ({"memory_fraction": 2.0}, "memory_fraction: must be over 0"),
        ],
        ids=str,
    )
    def test_when_a_setting_is_wrong_then_it_is_named(self, given: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            LLM("null", **given)

    def test_when_a_stop_is_one_string_then_it_is_the_only_stop(self) -> None:
        assert SamplingParams(stop="a", seed=3) == SamplingParams(stop=["a"], seed=3)
        assert SamplingParams(stop="a").options == JobOptions(stop=("a",))


class TestGivenAProgressBar:
    def test_when_it_is_asked_for_then_standard_error_has_the_number_of_prompts(
        self, null: LLM, capsys: pytest.CaptureFixture[str]
    ) -> None:
        null.generate(["a", "b", "c"], SamplingParams(max_tokens=4, ignore_eos=True), progress=True)

        printed = capsys.readouterr()
        assert "3/3" in printed.err
        assert "12 tokens" in printed.err
        assert printed.out == ""

    def test_when_standard_error_is_no_terminal_then_there_is_none(
        self, null: LLM, capsys: pytest.CaptureFixture[str]
    ) -> None:
        null.generate("a")

        assert capsys.readouterr().err == ""


class TestGivenAModelThatIsClosed:
    def test_when_it_is_closed_then_nothing_keeps_its_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded: list[weakref.ref[object]] = []

        def spied(config: WorkerConfig) -> LocalModel:
            model = load(config)
            loaded.append(weakref.ref(model.executor))
            return model

        monkeypatch.setattr(llm_module, "load", spied)
        with LLM() as llm:
            llm.generate("Once", SamplingParams(max_tokens=2))

        assert [one() for one in loaded] == [None]

    def test_when_it_is_used_then_it_says_so(self) -> None:
        llm = LLM("null")
        llm.close()
        llm.close()

        with pytest.raises(ValueError, match="closed"):
            llm.generate("a")


class TestGivenAnInstallationWithoutTheWorker:
    def test_when_the_model_is_imported_then_it_says_what_to_install(self) -> None:
        code = "import sys; sys.modules['jinja2'] = None\nfrom sluice import SamplingParams\nfrom sluice import LLM"

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

        assert done.stderr.splitlines()[-1] == (
            "ImportError: LLM needs the package 'jinja2': install the worker: pip install 'sluice-llm[worker]'"
        )


def test_when_a_folder_is_a_path_then_it_is_taken() -> None:
    (output,) = LLM(Path(SMALL_MODEL)).generate("Once", SamplingParams(max_tokens=1, ignore_eos=True))

    assert output.outputs[0].finish_reason is FinishReason.LENGTH


class TestGivenAChatWithTools:
    """The null model, which writes calls as Hermes does."""

    TOOLS: ClassVar[list[dict[str, object]]] = [
        {"type": "function", "function": {"name": name}} for name in ("look", "wait")
    ]

    def test_when_a_call_is_required_then_the_output_has_it_apart_from_the_text(self) -> None:
        with LLM("null", tool_format="hermes") as llm:
            (output,) = llm.chat(
                "Look.", SamplingParams(seed=1), tools=self.TOOLS, tool_choice="required", parallel_tool_calls=False
            )

        [call] = output.parsed.calls
        assert call.name in ("look", "wait")
        assert json.loads(call.arguments) == {}
        assert output.text == f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        assert output.parsed.content == ""

    def test_when_a_stream_is_taken_apart_then_it_has_the_parts_of_the_whole(self) -> None:
        with LLM("null", reasoning_format="think") as llm:
            pieces = list(llm.stream("Think.", SamplingParams(seed=1, max_tokens=30), as_chat=True))
        parser = OutputParser(OutputFormat.read(pieces[0].format))

        parts = [part for piece in pieces for part in parser.push(piece.text)] + parser.finish()

        assert pieces[-1].request_output is not None
        assert joined(parts) == pieces[-1].request_output.parsed

    def test_when_the_model_has_no_format_for_calls_then_the_chat_fails_with_a_sentence(self) -> None:
        with LLM("null") as llm:
            (output,) = llm.chat("Look.", tools=self.TOOLS)

        with pytest.raises(PromptFailed, match="--tool-format"):
            _ = output.parsed

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"tools": [{"type": "web"}]}, "type 'function'"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "run"}}}, "one of the tools"),
            ({"tools": TOOLS, "sampling_params": SamplingParams(ignore_eos=True)}, "ignore_eos"),
            ({"tools": TOOLS, "sampling_params": [SamplingParams(max_tokens=0, prompt_logprobs=1)]}, "nothing"),
        ],
    )
    def test_when_tools_are_wrong_then_it_raises_before_anything_runs(
        self, null: LLM, options: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(InvalidJob, match=words):
            null.chat("Look.", **options)
