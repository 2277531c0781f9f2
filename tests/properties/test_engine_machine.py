"""Requests that are added, aborted, failed, resumed and preempted in any order have their reference output."""

from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.engine.batch import Batch
from sluice.engine.config import StepLimits
from sluice.engine.executor import window_entries
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import ChoiceProgress, FinishReason, Request
from sluice.engine.speculation.draft_rows import DraftRows
from sluice.engine.speculation.model_drafts import ModelDrafts
from sluice.engine.speculation.source import DraftSource, Fallback
from sluice.engine.speculation.suffix_drafts import SuffixDrafts
from tests.engine.given import (
    JUNK,
    Checked,
    CheckingModel,
    Prophet,
    Transcripts,
    engine_over,
    lagging,
    note,
    request,
    undisturbed,
)
from tests.examples import examples

NUM_SLOTS = 60


@st.composite
def prompts(draw: st.DrawFn) -> bytes:
    """Short ones that often begin alike."""
    return draw(st.sampled_from([b"", b"aaaaaa", b"aaaabb", b"a" * 40])) + draw(st.binary(min_size=1, max_size=4))


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters of `Sampling`: all that ends an output, at the earliest and at the latest."""
    max_tokens = draw(st.integers(1, 14))
    return {
        "max_tokens": max_tokens,
        "seed": draw(st.integers(0, 3)),
        "stop": draw(st.sampled_from([(), ("a ",), ("é", "€", "b."), ("\ufffd\ufffda",)])),
        "ignore_eos": draw(st.booleans()),
        "min_tokens": min(max_tokens, draw(st.sampled_from([0, 0, 6]))),
    }


class FlakyModel(CheckingModel):
    """Fails the next attempts at more than one sequence on request, before or after it has written."""

    num_failures = 0
    is_late = False

    def launch(self, batch: Batch) -> Checked:
        if self.num_failures and len(batch.rows) > 1:
            self.num_failures -= 1
            if self.is_late:
                super().launch(batch)
            raise RuntimeError("injected failure")
        return super().launch(batch)


class EngineMachine(RuleBasedStateMachine):
    """A tiny cache, a small budget, and everything that may happen to a request."""

    @initialize(
        num_spare_blocks=st.integers(0, 6),
        block_size=st.sampled_from([1, 3, 4]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 20),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        lag=st.sampled_from([0, 1]),
        window=st.sampled_from([0, 0, 0, 1, 7]),
        groups=st.sampled_from([0, 1, 3]),
        num_host_blocks=st.sampled_from([0, 3, 20]),
        drafts=st.sampled_from([None, 0.0, 0.5, 1.0, "model"]),
        num_draft_blocks=st.sampled_from([3, 20, 100]),
    )
    def start(
        self,
        num_spare_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        policy: str,
        lag: int,
        window: int,
        groups: int,
        num_host_blocks: int,
        drafts: float | str | None,
        num_draft_blocks: int,
    ) -> None:
        self.expected: Transcripts = {}
        groups = groups if window else 0
        num_entries = -(-NUM_SLOTS // block_size)
        num_windowed = min(num_entries, window_entries(window, budget, block_size) + 1)
        num_blocks = num_entries + groups * num_windowed + num_spare_blocks
        pretended = NullModelConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            sliding_window=window,
            window_groups=groups,
            num_host_blocks=num_host_blocks,
            mean_output_tokens=12,
        )
        self.model = FlakyModel(pretended, alphabet=JUNK)
        self.draft_rows: DraftRows | None = None
        # A draft model needs the last tokens, which the host has at lag 0.
        lag = 0 if drafts == "model" else lag
        self.engine: LLMEngine = engine_over(
            lagging(self.model) if lag else self.model,
            draft_source=self.source_of(drafts, num_draft_blocks),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            policy=policy,
            max_step_retries=1,
        )
        self.asked: dict[str, Request] = {}
        self.transcripts: Transcripts = {}
        self.aborted: set[str] = set()

    def source_of(self, drafts: float | str | None, num_blocks: int) -> DraftSource | None:
        """A source whose share of right guesses is given, or a model that knows one of four seeds."""
        if drafts is None or isinstance(drafts, float):
            return Prophet(self.expected, drafts) if drafts is not None else None
        config = NullModelConfig(num_blocks=num_blocks, block_size=4, mean_output_tokens=12)
        model = CheckingModel(config, alphabet=JUNK)
        source = ModelDrafts(model, StepLimits(4, 12), vocab_size=model.limits.vocab_size, clock=lambda: 0.0)
        self.draft_rows = source.rows
        return Fallback(SuffixDrafts(), source)

    @rule(
        prompt=prompts(),
        num_choices=st.integers(1, 2),
        salt=st.sampled_from(["", "s"]),
        priority=st.integers(0, 2),
        sampling=samplings(),
    )
    def add(self, prompt: bytes, num_choices: int, salt: str, priority: int, sampling: dict[str, Any]) -> None:
        asked = request(
            f"r{len(self.asked)}", prompt, num_choices=num_choices, cache_salt=salt, priority=priority, **sampling
        )
        self.asked[asked.id] = asked
        self.expected |= undisturbed(asked, alphabet=JUNK, mean_output_tokens=12)
        self.engine.add([asked])

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            note(self.transcripts, self.engine.advance())
            self.engine.check_invariants()

    @rule(num_failures=st.integers(1, 3), is_late=st.booleans())
    def let_steps_fail(self, num_failures: int, is_late: bool) -> None:
        """One failure is retried; more make the engine divide the step."""
        self.model.num_failures, self.model.is_late = num_failures, is_late

    @precondition(lambda self: bool(self.asked))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.engine.abort([request_id])
        self.aborted.add(request_id)

    @precondition(lambda self: bool(self.asked))
    @rule(data=st.data(), is_known=st.booleans())
    def resume(self, data: st.DataObject, is_known: bool) -> None:
        """It was dropped, and returns with its published tokens."""
        request_id = data.draw(st.sampled_from(sorted(set(self.asked) - self.aborted) or ["none"]))
        asked = self.asked.get(request_id)
        if asked is None or not self.is_open(asked):
            return
        if is_known:
            self.engine.drop([request_id])
        found = [self.transcripts.get((request_id, choice)) for choice in range(asked.num_choices)]
        progress = tuple(
            ChoiceProgress(token_ids=tuple(t.token_ids), is_finished=t.finish is not None) if t else ChoiceProgress()
            for t in found
        )
        self.engine.add(
            [
                Request(
                    id=asked.id,
                    prompt_token_ids=asked.prompt_token_ids,
                    num_choices=asked.num_choices,
                    cache_salt=asked.cache_salt,
                    priority=asked.priority,
                    sampling=asked.sampling,
                    progress=progress,
                )
            ]
        )

    def is_open(self, asked: Request) -> bool:
        found = [self.transcripts.get((asked.id, choice)) for choice in range(asked.num_choices)]
        return any(transcript is None or transcript.finish is None for transcript in found)

    @invariant()
    def what_was_said_is_the_beginning_of_what_is_expected(self) -> None:
        for key, transcript in getattr(self, "transcripts", cast("Transcripts", {})).items():
            assert self.expected[key].token_ids[: len(transcript.token_ids)] == transcript.token_ids

    @invariant()
    def what_a_draft_model_holds_is_held_once(self) -> None:
        if (rows := cast("DraftRows | None", getattr(self, "draft_rows", None))) is not None:
            rows.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.model.num_failures = 0
        for _ in range(3000):
            if self.engine.is_idle:
                break
            note(self.transcripts, self.engine.advance())
            self.engine.check_invariants()
        assert self.engine.is_idle, "starved"
        assert self.engine.stats.kv_tokens_used == 0
        assert self.draft_rows is None or self.draft_rows.num_held == 0
        for asked in self.asked.values():
            self.check_end(asked)

    def check_end(self, asked: Request) -> None:
        for choice in range(asked.num_choices):
            output = self.transcripts[asked.id, choice]
            whole = self.expected[asked.id, choice]
            assert output.finish is not None
            if output.finish.reason is FinishReason.ABORTED:
                assert asked.id in self.aborted
                continue
            assert (output.token_ids, output.text, output.finish) == (whole.token_ids, whole.text, whole.finish)


EngineMachine.TestCase.settings = settings(max_examples=examples(240), stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
