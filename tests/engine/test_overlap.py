"""Steps that are planned and launched while the one before runs, on a device that lags by one step: every hazard."""

from collections.abc import Callable

import pytest

from sluice.engine.batch import Batch
from sluice.engine.config import DISCIPLINE_NAMES
from sluice.engine.errors import EngineBroken, OutOfMemory
from sluice.engine.executor import Executor, Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModelConfig
from sluice.engine.request import ChoiceProgress, FinishReason, Request, TokenDelta
from sluice.engine.testing.fault_injection import ChaoticExecutor, Fault, FaultKind
from tests.engine.given import (
    Checked,
    CheckingModel,
    Transcripts,
    checking_model,
    engine_over,
    lagging,
    note,
    request,
    run,
    undisturbed,
)
from tests.engine.lagging import LaggingExecutor

PROMPT = b"p" * 21


def alone(asked: Request, *, mean_output_tokens: int = 0, max_model_len: int = 8192) -> list[int]:
    transcripts = undisturbed(asked, mean_output_tokens=mean_output_tokens, max_model_len=max_model_len)
    return transcripts[asked.id, 0].token_ids


def with_lag(lag: int, model: CheckingModel) -> Executor:
    return lagging(model) if lag else model


def tokens(transcripts: Transcripts) -> dict[str, list[int]]:
    return {request_id: transcript.token_ids for (request_id, _), transcript in transcripts.items()}


def step_until(engine: LLMEngine, holds: Callable[[list[TokenDelta]], bool]) -> list[TokenDelta]:
    """All that was said up to the step of which `holds` is true."""
    output: list[TokenDelta] = []
    for _ in range(100):
        deltas = engine.advance()
        engine.check_invariants()
        output += deltas
        if holds(deltas):
            return output
    raise AssertionError("it never came")


def run_the_rest(engine: LLMEngine, transcripts: Transcripts) -> None:
    """Run to the end of what has begun."""
    while not engine.is_idle:
        note(transcripts, engine.advance())
        engine.check_invariants()
    assert engine.stats.kv_tokens_used == 0


def finishes(request_id: str) -> Callable[[list[TokenDelta]], bool]:
    return lambda deltas: any(d.request_id == request_id and d.finish is not None for d in deltas)


def says(request_id: str) -> Callable[[list[TokenDelta]], bool]:
    return lambda deltas: any(d.request_id == request_id for d in deltas)


class TestGivenADeviceThatLags:
    def test_when_steps_are_made_then_each_says_what_the_one_before_drew(self) -> None:
        engine = engine_over(lagging(checking_model()))
        asked = request("r", max_tokens=3)
        engine.add([asked])

        output = [[token for delta in engine.advance() for token in delta.token_ids] for _ in range(4)]

        assert output == [[], *([token] for token in alone(asked))]
        assert engine.is_idle

    def test_when_all_end_by_length_then_as_many_tokens_are_computed_as_at_lag_0(self) -> None:
        computed: list[int] = []
        for lag in (0, 1):
            model = checking_model()
            engine = engine_over(with_lag(lag, model))
            engine.add([request(f"r{n}", b"p" * (9 * n + 1), max_tokens=1 + 2 * n) for n in range(6)])
            run(engine)
            computed.append(model.num_computed_tokens)

        assert computed[0] == computed[1]

    def test_when_the_model_can_read_no_more_then_nothing_is_planned_past_its_end(self) -> None:
        model = checking_model(max_model_len=16)
        engine = engine_over(lagging(model))
        engine.add([request("r", b"p" * 10, max_tokens=6)])

        assert len(run(engine)["r", 0].token_ids) == 6
        assert model.num_computed_tokens == 15

    def test_when_choices_share_a_prompt_in_flight_then_it_is_computed_once(self) -> None:
        model = checking_model()
        engine = engine_over(lagging(model))
        engine.add([request("r", b"p" * 40, num_choices=3, max_tokens=4)])

        transcripts = run(engine)

        assert transcripts["r", 2].deltas[0].stats.num_cached_tokens == 39
        assert model.num_computed_tokens == 40 + 2 + 3 * 3

    def test_when_a_step_is_in_flight_then_the_engine_is_busy_and_its_tokens_not_owed(self) -> None:
        engine = engine_over(lagging(checking_model(num_blocks=64, block_size=4)))
        engine.add([request("r", b"p" * 100, max_tokens=2)])

        engine.advance()
        # 64 of its 100 tokens are on their way.
        assert (engine.is_idle, engine.idle_s) == (False, 0.0)
        assert engine.room().prefill_tokens == 2 * 64 - 36
        engine.advance()
        assert engine.room().kv_tokens == 4 * (64 - 25 - 1)

        run(engine)
        assert (engine.is_idle, engine.idle_s) == (True, float("inf"))

    def test_when_batches_are_padded_then_no_step_is_launched_ahead(self) -> None:
        device = lagging(checking_model())
        engine = engine_over(device, discipline="static")
        engine.add([request(f"r{n}", max_tokens=4) for n in range(3)])

        run(engine)

        assert device.num_lagged == 0

    @pytest.mark.parametrize("discipline", DISCIPLINE_NAMES)
    def test_when_requests_run_under_any_discipline_then_tokens_are_those_of_a_run_alone(self, discipline: str) -> None:
        device = lagging(checking_model(num_blocks=90, max_model_len=120, mean_output_tokens=9))
        engine = engine_over(device, discipline=discipline, max_num_seqs=3)
        asked = [request(f"r{n}", b"p" * (7 * n + 1), seed=n, max_tokens=30) for n in range(9)]
        engine.add(asked)

        assert tokens(run(engine)) == {one.id: alone(one, max_model_len=120, mean_output_tokens=9) for one in asked}
        assert (device.num_lagged > 20) == (discipline == "continuous")


class TestGivenALateStop:
    """It is known when the next step, with a row of the same sequence, is in flight."""

    def asked(self, kind: str) -> Request:
        free = undisturbed(request("r", PROMPT, max_tokens=30))["r", 0]
        ends = {"token": {"stop_token_ids": (free.token_ids[9],)}, "string": {"stop": (free.text[9:12],)}}
        return request("r", PROMPT, max_tokens=30, **ends[kind])

    @pytest.mark.parametrize("kind", ["token", "string"])
    def test_when_it_stops_then_its_late_row_is_discarded_and_its_blocks_freed_after_it(self, kind: str) -> None:
        asked = self.asked(kind)
        model = checking_model()
        engine = engine_over(lagging(model))
        engine.add([asked])

        output = step_until(engine, finishes("r"))

        assert [token for delta in output for token in delta.token_ids] == alone(asked)
        assert engine.stats.num_running == 0
        assert engine.stats.kv_tokens_used > 0
        assert not engine.is_idle
        assert engine.advance() == []
        assert engine.stats.kv_tokens_used == 0
        assert engine.is_idle
        assert model.num_computed_tokens == len(PROMPT) + len(alone(asked))

    @pytest.mark.parametrize("kind", ["token", "string"])
    def test_when_it_is_asked_to_go_on_then_its_late_row_is_not_found(self, kind: str) -> None:
        asked = self.asked(kind)
        cached: list[int] = []
        for lag in (0, 1):
            engine = engine_over(with_lag(lag, checking_model()))
            engine.add([asked])
            run(engine)
            # One more than was said: the late row computed the last token, but nothing may rely on it.
            follow_up = request("more", bytes([*PROMPT, *alone(asked), *b"..."]), max_tokens=5)
            engine.add([follow_up])
            transcripts = run(engine)
            assert tokens(transcripts) == {"more": alone(follow_up)}
            cached.append(transcripts["more", 0].deltas[0].stats.num_cached_tokens)

        assert cached[0] == cached[1] == len(PROMPT) + len(alone(asked)) - 1


class TestGivenBlocksThatAreUsedAgain:
    def test_when_many_end_late_in_a_tiny_cache_then_no_row_in_flight_loses_its_blocks(self) -> None:
        device = lagging(checking_model(num_blocks=14, mean_output_tokens=7))
        engine = engine_over(device)
        asked = [request(f"r{n}", f"prompt {n}", seed=n, max_tokens=40) for n in range(40)]
        engine.add(asked)

        transcripts = run(engine)

        assert tokens(transcripts) == {one.id: alone(one, mean_output_tokens=7) for one in asked}
        assert engine.stats.num_preemptions > 0
        assert device.num_lagged > 50


class TestGivenAPreemptionInFlight:
    """Two prompts of two blocks each; where both need a third block there is one: the second gives way to the first."""

    def started(self) -> tuple[LLMEngine, Transcripts, dict[str, list[int]]]:
        engine = engine_over(lagging(checking_model(num_blocks=6)), enable_prefix_caching=False)
        asked = [request(name, b"p" * 7, seed=n, max_tokens=12) for n, name in enumerate(("first", "second"))]
        engine.add(asked)
        return engine, {}, {one.id: alone(one) for one in asked}

    def test_when_one_gives_way_then_its_token_in_flight_counts_and_it_continues(self) -> None:
        engine, transcripts, expected = self.started()
        num_tokens = 0

        while engine.stats.num_preemptions == 0:
            num_tokens = len(transcripts["second", 0].token_ids) if transcripts else 0
            note(transcripts, engine.advance())
            engine.check_invariants()

        # The step that was in flight when it gave way is collected, with its row; and it waits now.
        assert len(transcripts["second", 0].token_ids) == num_tokens + 1
        assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 1)
        run_the_rest(engine, transcripts)
        assert tokens(transcripts) == expected

    @pytest.mark.parametrize("how", ["abort", "drop"])
    def test_when_it_is_then_cancelled_then_its_blocks_are_given_back_once(self, how: str) -> None:
        engine, transcripts, expected = self.started()
        while engine.stats.num_preemptions == 0:
            note(transcripts, engine.advance())

        (engine.abort if how == "abort" else engine.drop)(["second"])

        engine.check_invariants()
        run_the_rest(engine, transcripts)
        assert tokens(transcripts)["first"] == expected["first"]

    def test_when_its_row_in_flight_is_bad_then_its_blocks_are_not_found(self) -> None:
        _, output = self.until_the_second_gives_way()
        at = len(output["second", 0].token_ids) - 1

        engine, transcripts = self.until_the_second_gives_way(Fault(kind=FaultKind.NAN, at=at, request_id="second"))

        finish = transcripts["second", 0].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        engine.abort(["first"])
        run_the_rest(engine, transcripts)
        engine.add([request("again", b"p" * 7 + b"q" * 8, cache_salt="second", max_tokens=1)])
        (delta,) = run(engine)["again", 0].deltas
        assert delta.stats.num_cached_tokens == 0

    def until_the_second_gives_way(self, *faults: Fault) -> tuple[LLMEngine, Transcripts]:
        model = checking_model(num_blocks=6)
        engine = engine_over(LaggingExecutor(ChaoticExecutor(model, faults), scribble=model.scribble))
        names = ("first", "second")
        engine.add([request(name, b"p" * 7, seed=n, cache_salt=name, max_tokens=12) for n, name in enumerate(names)])
        transcripts: Transcripts = {}
        while engine.stats.num_preemptions == 0:
            note(transcripts, engine.advance())
        return engine, transcripts


class TestGivenACancelInFlight:
    def started(self, *names: str) -> tuple[LLMEngine, Transcripts, dict[str, list[int]]]:
        engine = engine_over(lagging(checking_model()))
        asked = [request(name, f"prompt of {name}", max_tokens=9) for name in names]
        engine.add(asked)
        transcripts: Transcripts = {}
        for _ in range(4):
            note(transcripts, engine.advance())
        return engine, transcripts, {one.id: alone(one) for one in asked}

    def test_when_one_is_aborted_then_only_its_end_is_output_and_blocks_outlast_its_row(self) -> None:
        engine, transcripts, _ = self.started("gone")
        num_used = engine.stats.kv_tokens_used

        engine.abort(["gone"])

        assert engine.stats.kv_tokens_used == num_used > 0
        assert not engine.is_idle
        (delta,) = engine.advance()
        note(transcripts, [delta])
        assert delta.finish is not None
        assert (delta.finish.reason, delta.token_ids) == (FinishReason.ABORTED, ())
        assert (engine.is_idle, engine.stats.kv_tokens_used) == (True, 0)

    @pytest.mark.parametrize("how", ["abort", "drop"])
    def test_when_one_of_several_goes_then_the_others_do_not_notice(self, how: str) -> None:
        engine, transcripts, expected = self.started("one", "gone", "other")

        (engine.abort if how == "abort" else engine.drop)(["gone"])
        run_the_rest(engine, transcripts)

        assert tokens(transcripts)["one"] == expected["one"]
        assert tokens(transcripts)["other"] == expected["other"]
        gone = transcripts["gone", 0]
        assert gone.token_ids == expected["gone"][:3]
        assert (gone.finish is None) == (how == "drop")

    def test_when_a_dropped_one_comes_back_then_it_resumes_at_the_stated_offset(self) -> None:
        engine, transcripts, expected = self.started("r")
        asked = request(
            "r",
            "prompt of r",
            max_tokens=9,
            progress=(ChoiceProgress(token_ids=tuple(transcripts["r", 0].token_ids)),),
        )

        engine.drop(["r"])
        engine.add([asked])
        run_the_rest(engine, transcripts)

        assert tokens(transcripts) == expected


class TestGivenARowThatANewcomerTakes:
    """Slot reuse: nothing that belongs to a row of a batch may go over to the sequence that has it next."""

    def test_when_a_row_ends_late_then_its_next_sequence_has_its_own_token_seed_and_end(self) -> None:
        device = lagging(checking_model(mean_output_tokens=5))
        engine = engine_over(device, max_num_seqs=2)
        asked = [request(f"r{n}", b"p" * (3 + n % 3), seed=n, max_tokens=12) for n in range(30)]
        engine.add(asked)

        assert tokens(run(engine)) == {one.id: alone(one, mean_output_tokens=5) for one in asked}

    def test_when_an_id_is_reused_in_flight_then_the_old_token_is_not_fed_to_the_new_one(self) -> None:
        engine = engine_over(lagging(checking_model()), max_num_seqs=1)
        engine.add([request("r", "the old one", max_tokens=9)])
        engine.advance()
        engine.advance()

        engine.add([request("r", "the new one", max_tokens=3)])

        assert tokens(run(engine)) == {"r": alone(request("r", "the new one", max_tokens=3))}


class WatchingExecutor:
    """Notes the sequences that are launched before the token that they need is known."""

    lag = 1

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.limits = executor.limits
        self.fingerprint = executor.fingerprint
        self.fed: set[str] = set()
        self._in_flight: set[tuple[int, int]] = set()
        """For each token that the step in flight samples: its sequence and its position."""

        self._requests: dict[int, str] = {}

    def launch(self, batch: Batch) -> Launched:
        self._requests |= {one.sequence_id: one.request_id for one in batch.admissions}
        self.fed |= {
            self._requests[row.sequence_id] for row in batch.rows if (row.sequence_id, row.start) in self._in_flight
        }
        self._in_flight = {(row.sequence_id, row.start + row.num_tokens) for row in batch.rows if row.samples}
        return self._executor.launch(batch)


class TestGivenASequenceWithAPenalty:
    @pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
    def test_when_its_last_token_is_in_flight_then_its_next_is_planned_as_any_other(self, name: str) -> None:
        device = WatchingExecutor(lagging(checking_model()))
        engine = engine_over(device)
        asked = [
            request("plain", max_tokens=12, min_tokens=5),
            request("penalised", "hello", max_tokens=6, **{name: 1.5}),
        ]
        engine.add(asked)

        transcripts = run(engine)

        assert device.fed == {"plain", "penalised"}
        assert tokens(transcripts) == {one.id: alone(one) for one in asked}


class FlakyModel(CheckingModel):
    """Fails the steps of these numbers."""

    def __init__(self, config: NullModelConfig, *failing: int) -> None:
        super().__init__(config)
        self._failing = failing
        self._num_steps = 0

    def launch(self, batch: Batch) -> Checked:
        self._num_steps += 1
        if self._num_steps in self._failing:
            raise RuntimeError("injected failure")
        return super().launch(batch)


class CrampedModel(CheckingModel):
    """Has memory for steps of so many tokens."""

    room = 9

    def launch(self, batch: Batch) -> Checked:
        if batch.num_tokens > self.room:
            raise OutOfMemory(f"no memory for {batch.num_tokens} tokens")
        return super().launch(batch)


class TestGivenAStepThatFailsInFlight:
    def eight(self) -> list[Request]:
        return [request(f"r{n}", f"prompt of r{n}", max_tokens=7) for n in range(8)]

    @pytest.mark.parametrize("failing", range(1, 8))
    def test_when_it_is_retried_then_the_step_on_top_is_replanned_without_effect(self, failing: int) -> None:
        # What runs after the failing one is the void step on top of it, then the one that failed, again.
        engine = engine_over(lagging(FlakyModel(NullModelConfig(num_blocks=64, block_size=4), failing)))
        engine.add(self.eight())

        transcripts = run(engine)

        assert tokens(transcripts) == {one.id: alone(one) for one in self.eight()}
        assert engine.stats.num_failed_attempts == 1

    @pytest.mark.parametrize("where", ["on the device", "at the launch"])
    @pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.NAN])
    def test_when_one_row_is_the_culprit_then_it_alone_ends_with_an_error(self, kind: FaultKind, where: str) -> None:
        fault = Fault(kind=kind, at=3, request_id="r5")
        model = checking_model()
        executor = (
            LaggingExecutor(ChaoticExecutor(model, [fault]), scribble=model.scribble)
            if where == "on the device"
            else ChaoticExecutor(lagging(model), [fault])
        )
        engine = engine_over(executor)
        engine.add(self.eight())

        transcripts = run(engine)

        for one in self.eight():
            finish = transcripts[one.id, 0].finish
            assert finish is not None
            assert finish.reason is (FinishReason.ERROR if one.id == "r5" else FinishReason.LENGTH)
            assert transcripts[one.id, 0].token_ids == alone(one)[: 3 if one.id == "r5" else None]

    def test_when_the_culprit_was_aborted_meanwhile_then_none_is_blamed(self) -> None:
        model = checking_model()
        device = LaggingExecutor(
            ChaoticExecutor(model, [Fault(kind=FaultKind.FAIL, at=2, request_id="bad")]), scribble=model.scribble
        )
        engine = engine_over(device, max_step_retries=0)
        good = request("good", max_tokens=6)
        engine.add([request("bad", max_tokens=6), good])
        transcripts: Transcripts = {}
        for _ in range(3):
            note(transcripts, engine.advance())

        engine.abort(["bad"])
        run_the_rest(engine, transcripts)

        bad = transcripts["bad", 0].finish
        assert bad is not None
        assert bad.reason is FinishReason.ABORTED
        assert transcripts["good", 0].token_ids == alone(good)
        assert engine.stats.num_failed_attempts == 1

    def test_when_all_of_its_rows_were_dropped_then_the_device_is_not_suspected(self) -> None:
        engine = engine_over(lagging(FlakyModel(NullModelConfig(num_blocks=64, block_size=4), 2, 3, 4, 5)))
        engine.add([request("r", max_tokens=9)])
        engine.advance()
        engine.advance()

        engine.drop(["r"])

        assert engine.advance() == []
        assert engine.is_idle

    def test_when_all_its_rows_are_bad_then_the_device_check_spares_who_joined_on_top(
        self,
    ) -> None:
        model = checking_model()
        fault = Fault(kind=FaultKind.NAN, at=1, request_id="bad")
        engine = engine_over(LaggingExecutor(ChaoticExecutor(model, [fault]), scribble=model.scribble))
        good = request("good", max_tokens=6)
        transcripts: Transcripts = {}
        engine.add([request("bad", max_tokens=6)])
        note(transcripts, engine.advance())
        note(transcripts, engine.advance())

        engine.add([good])
        run_the_rest(engine, transcripts)

        assert transcripts["bad", 0].token_ids == alone(request("bad", max_tokens=6))[:1]
        assert transcripts["good", 0].token_ids == alone(good)
        assert engine.stats.num_failed_attempts == 0

    def test_when_it_lacks_memory_then_smaller_ones_are_planned_and_none_is_blamed(self) -> None:
        device = lagging(CrampedModel(NullModelConfig(num_blocks=64, block_size=4)))
        engine = engine_over(device)
        engine.add(self.eight())

        assert tokens(run(engine)) == {one.id: alone(one) for one in self.eight()}
        assert device.num_lagged > 10

    def test_when_the_device_is_lost_at_a_launch_then_nothing_has_moved(self) -> None:
        fault = Fault(kind=FaultKind.LOSE, at=2, request_id="r0", times=1)
        engine = engine_over(ChaoticExecutor(lagging(checking_model()), [fault]))
        engine.add(self.eight())
        transcripts: Transcripts = {}
        note(transcripts, engine.advance())
        note(transcripts, engine.advance())

        with pytest.raises(EngineBroken, match="injected loss"):
            engine.advance()

        engine.check_invariants()
        run_the_rest(engine, transcripts)
        assert tokens(transcripts) == {one.id: alone(one) for one in self.eight()}

    def test_when_the_device_computes_nothing_then_the_engine_is_broken_and_no_job_fails(self) -> None:
        model = FlakyModel(NullModelConfig(num_blocks=64, block_size=4), *range(3, 99))
        engine = engine_over(lagging(model))
        engine.add([request(f"r{n}", max_tokens=9) for n in range(3)])

        output: list[TokenDelta] = []
        with pytest.raises(EngineBroken, match="injected failure"):
            output += step_until(engine, finishes("r0"))

        engine.check_invariants()
        assert engine.stats.num_running == 3
