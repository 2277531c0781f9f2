"""Requests with grammars: their outputs match, whatever runs beside them, at both lags; and nothing else changes."""

import json
import re
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.batch import Batch
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import (
    ChoiceProgress,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Sampling,
    TokenDelta,
)
from sluice.engine.speculation.source import DraftSource
from sluice.engine.text.tokenizer import load_tokenizer
from sluice.worker.model.folders import SMALL_MODEL
from tests.engine.given import Checked, CheckingModel, Prophet, checking_model, engine_over, lagging, run
from tests.engine.lagging import LaggingExecutor

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace", "Frances"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def asked(name: str, grammar: Grammar | None, **options: object) -> Request:
    sampling = Sampling(**({"max_tokens": 200, "temperature": 1.0} | options))  # pyright: ignore[reportArgumentType] - options of several types
    return Request(id=name, prompt_token_ids=tuple(b"Hello " + name.encode()), sampling=sampling, grammar=grammar)


def schema(value: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def ended(engine: LLMEngine) -> dict[str, list[TokenDelta]]:
    """Run to the end; the deltas of each request."""
    deltas: dict[str, list[TokenDelta]] = {}
    while not engine.is_idle:
        for delta in engine.advance():
            deltas.setdefault(delta.request_id, []).append(delta)
        engine.check_invariants()
    return deltas


def text(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def small_engine(
    *,
    lag: Literal[0, 1] = 0,
    is_late: bool = True,
    num_blocks: int = 400,
    draft_source: DraftSource | None = None,
    **options: object,
) -> LLMEngine:
    runner = load_model_runner(
        ModelOptions(
            path=SMALL_MODEL,
            num_blocks=num_blocks,
            max_model_len=min(512, 16 * num_blocks),
            max_num_seqs=8,
            num_threads=1,
            lag=lag,
        )
    )
    executor = LaggingExecutor(runner) if lag and is_late else runner
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(**(limits | options))  # pyright: ignore[reportArgumentType] - options of several types
    return LLMEngine(executor, load_tokenizer(SMALL_MODEL), config, draft_source=draft_source)


def drafts_of(model: CheckingModel) -> list[int]:
    """Note the drafts of all steps from now on."""
    launch, drafts = model.launch, list[int]()

    def noted(batch: Batch) -> Checked:
        drafts.extend(token_id for guesses in batch.drafts.values() for token_id in guesses)
        return launch(batch)

    model.launch = noted  # pyright: ignore[reportAttributeAccessIssue] - for this test only
    return drafts


def failing(model: CheckingModel, num_failures: int) -> CheckingModel:
    """Let the first attempts at steps with drafts raise."""
    launch, left = model.launch, [num_failures]

    def launch_or_fail(batch: Batch) -> Checked:
        if batch.drafts and left[0]:
            left[0] -= 1
            raise RuntimeError("injected failure")
        return launch(batch)

    model.launch = launch_or_fail
    return model


class TestGivenAModelWithoutKnowledge:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("num_blocks", [24, 200])
    def test_when_schemas_and_others_share_steps_then_each_is_as_if_alone(self, lag: int, num_blocks: int) -> None:
        random = Random(lag + num_blocks)
        requests = [
            asked(
                f"r{number}", schema(SCHEMA) if number % 3 else None, seed=number, max_tokens=random.randrange(20, 70)
            )
            for number in range(12)
        ]
        alone: dict[str, list[int]] = {}
        for request in requests:
            engine = engine_over(checking_model(num_blocks=200))
            engine.add([request])
            alone |= {request.id: tokens(ended(engine)[request.id])}
        model = checking_model(num_blocks=num_blocks)
        engine = engine_over(lagging(model) if lag else model)

        engine.add(requests)
        together = ended(engine)

        assert {name: tokens(deltas) for name, deltas in together.items()} == alone
        assert (engine.stats.num_preemptions > 0) == (num_blocks == 24)

    @settings(max_examples=25, deadline=None)
    @given(
        share_right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        lag=st.sampled_from([0, 1]),
        num_blocks=st.sampled_from([40, 400]),
        is_forced=st.booleans(),
        min_tokens=st.sampled_from([0, 5, 30]),
        failures=st.sampled_from([0, 3]),
    )
    def test_when_drafts_are_verified_then_the_tokens_are_the_same(
        self, share_right: float, lag: int, num_blocks: int, is_forced: bool, min_tokens: int, failures: int
    ) -> None:
        requests = [
            asked(
                f"r{n}",
                schema(SCHEMA) if n % 3 else None,
                seed=n,
                max_tokens=120,
                min_tokens=min_tokens,
                logprobs=None if is_forced else 0,
            )
            for n in range(6)
        ]
        reference = engine_over(checking_model(num_blocks=400))
        reference.add(requests)
        expected = run(reference)
        model = checking_model(num_blocks=num_blocks)
        engine = engine_over(
            lagging(failing(model, failures)) if lag else failing(model, failures),
            draft_source=Prophet(expected, share_right),
        )

        engine.add(requests)
        drafted = run(engine)

        assert {name: (one.token_ids, one.text, one.finish) for name, one in drafted.items()} == {
            name: (one.token_ids, one.text, one.finish) for name, one in expected.items()
        }
        assert model.num_drafts or failures or not share_right

    def test_when_all_guesses_are_right_then_constrained_sequences_take_fewer_steps(self) -> None:
        requests = [asked(f"r{n}", schema(SCHEMA), seed=n, logprobs=0) for n in range(2)]
        reference = engine_over(checking_model(num_blocks=400))
        reference.add(requests)
        expected = run(reference)
        engine = engine_over(checking_model(num_blocks=400), draft_source=Prophet(expected, 1.0))

        engine.add(requests)
        run(engine)

        assert 2 * engine.stats.num_steps < reference.stats.num_steps

    def test_when_a_guess_cannot_follow_then_it_is_no_draft(self) -> None:
        requests = [asked("r", schema(SCHEMA), seed=1, logprobs=0)]
        reference = engine_over(checking_model(num_blocks=400))
        reference.add(requests)
        expected = run(reference)
        model = checking_model(num_blocks=400)
        # Its wrong guesses are question marks, which the schema has nowhere.
        engine = engine_over(model, draft_source=Prophet(expected, 0.0))

        engine.add(requests)
        drafts = drafts_of(model)
        run(engine)

        assert model.num_drafts == len(drafts) > 0
        assert ord("?") not in drafts

    def test_when_the_grammar_is_complete_then_only_the_end_follows(self) -> None:
        engine = engine_over(checking_model())
        engine.add([asked("r", Grammar(kind="choice", text='["red"]'))])

        transcript = run(engine)["r", 0]

        assert transcript.token_ids == [*b"red", 256]

    @pytest.mark.parametrize("is_resumed", [False, True])
    def test_when_progress_does_not_match_the_grammar_then_the_request_fails(self, is_resumed: bool) -> None:
        progress = (ChoiceProgress(token_ids=tuple(b"blue" if is_resumed else b"re")),)
        engine = engine_over(checking_model())
        request = asked("r", Grammar(kind="choice", text='["red"]'))
        engine.add([replace(request, progress=progress)])

        finish = ended(engine)["r"][-1].finish

        assert finish is not None
        assert (finish.reason is FinishReason.ERROR) == is_resumed


EXTRACTION = {
    "type": "object",
    "properties": {
        "first_name": {"enum": ["Ada", "Grace", "Frances"]},
        "date_of_birth": {"type": "string", "format": "date"},
        "employer": {"type": "object", "properties": {"kind": {"enum": ["university", "union"]}}, "required": ["kind"]},
        "scores": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 3},
    },
    "required": ["first_name", "date_of_birth", "employer", "scores"],
    "additionalProperties": False,
}
"""Most of whose text follows from its beginning."""

Ends = dict[str, tuple[list[int], str, Finish | None]]


@pytest.fixture
def hasty_threads() -> Generator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
class TestGivenGrammarsThatAreBeingCompiled:
    def test_when_another_thread_counts_the_requests_then_it_may_do_so_at_any_time(self) -> None:
        """As the heartbeat does."""
        engine = small_engine()
        requests = [asked(f"r{number}", Grammar(kind="regex", text="a+")) for number in range(50)]

        def add_and_drop() -> None:
            for _ in range(300):
                engine.add(requests)
                engine.drop([request.id for request in requests])

        with ThreadPoolExecutor(1) as another:
            work = another.submit(add_and_drop)
            seen = {engine.stats.num_waiting for _ in iter(work.done, True)}
            work.result()

        assert seen <= set(range(51))


class TestGivenTokensThatTheGrammarForces:
    """Requests that ask for log-probabilities have every token drawn: their outputs are the reference."""

    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_when_they_are_added_without_a_draw_then_the_outputs_are_the_same(self, data: st.DataObject) -> None:
        requests = [self.request(f"r{number}", data) for number in range(data.draw(st.integers(1, 6)))]
        drawn = self.outputs(
            engine_over(checking_model(num_blocks=400)),
            [replace(one, sampling=replace(one.sampling, logprobs=0)) for one in requests],
        )
        lag, num_blocks = data.draw(st.sampled_from([0, 1])), data.draw(st.sampled_from([60, 90, 400]))
        budget, has_drafts = data.draw(st.sampled_from([8, 13, 64])), data.draw(st.booleans())
        model = checking_model(num_blocks=num_blocks)
        engine = engine_over(
            lagging(model) if lag else model,
            max_num_batched_tokens=budget,
            speculation="suffix" if has_drafts else "off",
        )

        forced = self.outputs(engine, requests)

        assert forced == drawn

    @settings(max_examples=15, deadline=None)
    @given(data=st.data())
    def test_when_a_request_is_resumed_anywhere_then_the_rest_is_the_same(self, data: st.DataObject) -> None:
        asked = self.request("r", data)
        whole, text, finish = self.outputs(engine_over(checking_model(num_blocks=400)), [asked])["r"]
        count = data.draw(st.integers(0, len(whole) - 1))
        progress = (ChoiceProgress(token_ids=tuple(whole[:count])),)

        rest = self.outputs(engine_over(checking_model(num_blocks=400)), [replace(asked, progress=progress)])["r"]

        assert rest[0] == whole[count:]
        assert (text.endswith(rest[1]), rest[2]) == (True, finish)

    def test_when_most_are_forced_then_there_are_fewer_steps(self) -> None:
        num_steps: list[int] = []
        for logprobs in (None, 0):
            engine = engine_over(checking_model(num_blocks=400))
            engine.add([asked("r", schema(EXTRACTION), logprobs=logprobs, max_tokens=300)])
            ended(engine)
            num_steps.append(engine.stats.num_steps)

        assert 2 * num_steps[0] < num_steps[1]

    def test_when_the_device_lags_then_they_are_added_too(self) -> None:
        engine = engine_over(lagging(checking_model(num_blocks=400)))
        engine.add([asked("r", schema(EXTRACTION), max_tokens=300)])

        num_tokens = len(tokens(ended(engine)["r"]))

        assert 2 * engine.stats.num_steps < num_tokens

    def test_when_a_forced_token_ends_the_output_then_it_ends_in_that_step(self) -> None:
        engine = engine_over(checking_model())
        engine.add([asked("r", Grammar(kind="choice", text='["red"]'))])

        [delta] = [delta for delta in ended(engine)["r"] if delta.token_ids]

        assert delta.token_ids == (*b"red", 256)
        assert delta.text == "red"
        assert delta.finish == Finish(reason=FinishReason.STOP)

    def request(self, name: str, data: st.DataObject) -> Request:
        options: dict[str, object] = {
            "max_tokens": data.draw(st.integers(1, 160)),
            "min_tokens": 0,
            "temperature": data.draw(st.sampled_from([0.0, 1.0])),
            "seed": data.draw(st.integers(0, 3)),
            "stop": data.draw(st.sampled_from([(), ("birth",), ('": "',), ("y", "ri")])),
            "stop_token_ids": data.draw(st.sampled_from([(), (ord("_"),)])),
        }
        return asked(name, schema(data.draw(st.sampled_from([EXTRACTION, SCHEMA]))), **options)

    def outputs(self, engine: LLMEngine, requests: list[Request]) -> Ends:
        engine.add(requests)
        return {
            name: (tokens(deltas), text(deltas), deltas[-1].finish) for name, deltas in ended(engine).items() if deltas
        }


class TestGivenTheSmallModel:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "options", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.9}], ids=["plain", "penalised"]
    )
    @pytest.mark.parametrize("num_blocks", [18, 400])
    def test_when_tokens_are_forced_then_they_are_those_that_would_be_drawn(
        self, temperature: float, options: dict[str, float], num_blocks: int
    ) -> None:
        outputs: list[dict[str, list[int]]] = []
        num_preemptions: list[int] = []
        for logprobs in (None, 0):
            engine = small_engine(num_blocks=num_blocks if logprobs is None else 400)
            engine.add(
                asked(f"r{n}", schema(EXTRACTION), seed=n, temperature=temperature, logprobs=logprobs, **options)
                for n in range(6)
            )
            outputs.append({name: tokens(deltas) for name, deltas in ended(engine).items()})
            num_preemptions.append(engine.stats.num_preemptions)

        assert outputs[0] == outputs[1]
        assert (num_preemptions[0] > 0) == (num_blocks == 18)

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_when_grammars_guess_what_is_likely_then_the_tokens_are_the_same_in_fewer_steps(
        self, lag: Literal[0, 1], temperature: float
    ) -> None:
        found: list[tuple[dict[str, list[int]], int]] = []
        for guesses in (None, Prophet({}, 0.0)):
            engine = small_engine(lag=lag, is_late=False, draft_source=guesses)
            # One at a time: a guess takes little of a step.
            outputs = dict[str, list[int]]()
            for seed in range(4):
                engine.add([asked(f"r{seed}", schema(EXTRACTION), seed=seed, temperature=temperature)])
                outputs |= {name: tokens(deltas) for name, deltas in ended(engine).items()}
            found.append((outputs, engine.stats.num_steps))

        (expected, num_steps), (guessed, num_steps_with_guesses) = found
        assert guessed == expected
        assert num_steps_with_guesses < 0.9 * num_steps

    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
    def test_when_schemas_are_asked_then_every_whole_output_is_valid(
        self, lag: Literal[0, 1], temperature: float
    ) -> None:
        engine = small_engine(lag=lag)
        requests = [asked(f"r{n}", schema(SCHEMA), temperature=temperature, seed=n) for n in range(12)]

        engine.add(requests)
        outputs = ended(engine)

        for deltas in outputs.values():
            assert deltas[-1].finish is not None
            assert deltas[-1].finish.reason is FinishReason.STOP
            jsonschema.validate(json.loads(text(deltas)), SCHEMA)

    @pytest.mark.parametrize("is_late", [False, True])
    @pytest.mark.parametrize("speculation", ["off", "suffix"])
    def test_when_the_device_lags_then_the_tokens_are_the_same(self, is_late: bool, speculation: str) -> None:
        outputs: list[dict[str, list[int]]] = []
        for lag in (0, 1):
            engine = small_engine(lag=lag, is_late=is_late, num_blocks=400 - 370 * lag, speculation=speculation)
            engine.add(
                asked(
                    f"r{n}",
                    (None, schema(SCHEMA), schema(EXTRACTION))[n % 3],
                    seed=n,
                    max_tokens=60,
                    logprobs=2 if n % 4 == 0 else None,
                    repetition_penalty=1.0 + (n % 2) / 4,
                )
                for n in range(12)
            )
            outputs.append({name: tokens(deltas) for name, deltas in ended(engine).items()})

        assert outputs[0] == outputs[1]

    def test_when_the_device_lags_then_each_step_has_a_token_of_a_constrained_sequence(self) -> None:
        engine = small_engine(lag=1, is_late=False)
        engine.add([asked("r", schema(SCHEMA), logprobs=0)])

        num_tokens = len(tokens(ended(engine)["r"]))

        assert num_tokens <= engine.stats.num_steps <= num_tokens + 2

    @pytest.mark.parametrize(
        ("kind", "grammar", "pattern"),
        [
            ("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"\d{4}-\d\d-\d\d"),
            ("choice", '["yes", "no", "\\u00fcber", "a \\"quoted\\" \\\\ text"]', r'yes|no|über|a "quoted" \\ text'),
            ("lark", 'start: "(" NUMBER ("," NUMBER)~2 ")"\nNUMBER: /[0-9]{1,3}/', r"\(\d{1,3}(,\d{1,3}){2}\)"),
            ("regex", "(é|😀|ж){3}!", "(é|😀|ж){3}!"),
        ],
    )
    def test_when_other_grammars_are_asked_then_the_outputs_match(
        self, kind: GrammarKind, grammar: str, pattern: str
    ) -> None:
        engine = small_engine()
        engine.add([asked(f"r{n}", Grammar(kind=kind, text=grammar), temperature=2.0, seed=n) for n in range(5)])

        outputs = ended(engine)

        assert all(re.fullmatch(pattern, text(deltas)) for deltas in outputs.values()), outputs

    def test_when_an_object_is_asked_then_it_is_one(self) -> None:
        engine = small_engine()
        engine.add([asked(f"r{n}", Grammar(kind="json_object"), seed=n, max_tokens=150) for n in range(4)])

        outputs = ended(engine)

        whole = [deltas for deltas in outputs.values() if deltas[-1].finish and deltas[-1].finish.reason == "stop"]
        assert all(isinstance(json.loads(text(deltas)), dict) for deltas in whole)

    def test_when_other_options_edit_the_same_row_then_the_output_still_matches(self) -> None:
        engine = small_engine()
        options = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {5: 100.0}, "min_p": 0.01}
        engine.add([asked(f"r{n}", schema(SCHEMA), seed=n, logprobs=2, **options) for n in range(4)])

        for deltas in ended(engine).values():
            jsonschema.validate(json.loads(text(deltas)), SCHEMA)


HOSTILE = {
    "references to references": schema(
        {
            "$defs": {
                **{f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(1500)},
                "a1500": {"type": "string"},
            },
            "$ref": "#/$defs/a0",
        }
    ),
    "alternatives of alternatives": schema(
        {
            "$defs": {
                **{f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"minItems": n}] * 2} for n in range(60)},
                "a60": {"type": "string"},
            },
            "$ref": "#/$defs/a0",
        }
    ),
    "itself": schema({"allOf": [{"$ref": "#"}]}),
    "brackets": Grammar(kind="json_schema", text='{"items":' * 10_000 + "{}" + "}" * 10_000),
    "parentheses": Grammar(kind="regex", text="(" * 50_000 + "a" + ")" * 50_000),
    "repetitions": Grammar(kind="regex", text="((((a{1,900}){1,900}){1,900}){1,900}){1,900}"),
    "many states": Grammar(kind="regex", text="(.*a.{400}|.*b.{401}|.*c.{402})z"),
    "terminals of terminals": Grammar(
        kind="lark",
        text="start: R0\n" + "".join(f'R{n}: "a" R{n + 1} "b" | "a" R{n + 1} "c"\n' for n in range(900)) + 'R900: "a"',
    ),
    "too many rules": Grammar(kind="lark", text="start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(9000))),
    "rules that double": Grammar(
        kind="lark", text="start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(60)) + 'r60: "a"'
    ),
    "ten megabytes": schema({"enum": ["x" * 100] * 100_000}),
    "many properties": schema({"properties": {f"key{n}": {"type": "string", "pattern": "a*b"} for n in range(2000)}}),
}


@pytest.mark.timeout(60)
class TestGivenHostileGrammars:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_when_it_is_asked_then_it_ends_and_its_neighbour_is_untouched(self, name: str) -> None:
        engine = small_engine()
        engine.add([asked("neighbour", None)])
        alone = tokens(ended(engine)["neighbour"])

        engine.add([asked("hostile", HOSTILE[name]), asked("neighbour", None)])
        outputs = ended(engine)

        finish = outputs["hostile"][-1].finish
        assert tokens(outputs["neighbour"]) == alone
        assert finish is not None
        if finish.reason is FinishReason.ERROR:
            assert finish.is_rejection
            assert finish.error
            assert len(finish.error) < 600
