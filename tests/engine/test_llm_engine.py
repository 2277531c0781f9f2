"""The engine over the null model: what is asked, what is said."""

from collections import deque
from dataclasses import replace

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import END_OF_SEQUENCE, NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import ChoiceProgress, Embed, Finish, FinishReason, Request, Room
from sluice.engine.scheduling.lookahead import Lookahead
from sluice.engine.text.tokenizer import Tokenizer, TokenizerFacts
from tests.engine.given import (
    JUNK,
    Transcripts,
    checking_model,
    engine_over,
    lagging,
    note,
    request,
    run,
    undisturbed,
)
from tests.engine.vocabularies import byte_level_backend


def resumed(asked: Request, *, num_tokens: int) -> Request:
    """`asked`, as it is asked again when its first `num_tokens` were said before."""
    output = undisturbed(asked)[asked.id, 0].token_ids[:num_tokens]
    return Request(
        id=asked.id,
        prompt_token_ids=asked.prompt_token_ids,
        sampling=asked.sampling,
        progress=(ChoiceProgress(token_ids=tuple(output)),),
    )


class TestGivenRequests:
    def test_when_they_run_together_then_each_gets_what_it_gets_alone(self) -> None:
        asked = [request(f"r{n}", f"prompt {n}", seed=n, max_tokens=5 + n) for n in range(6)]
        engine = engine_over(checking_model())

        engine.add(asked)
        transcripts = run(engine)

        for each in asked:
            alone = undisturbed(each)[each.id, 0]
            assert transcripts[each.id, 0].token_ids == alone.token_ids
            assert transcripts[each.id, 0].text == alone.text == bytes(alone.token_ids).decode()

    def test_when_the_cache_is_tiny_then_they_are_preempted_and_say_the_same(self) -> None:
        asked = [request(f"r{n}", f"prompt {n}", seed=n, max_tokens=20) for n in range(6)]
        engine = engine_over(checking_model(num_blocks=14))

        engine.add(asked)
        transcripts = run(engine)

        assert engine.stats.num_preemptions > 0
        assert {key: t.token_ids for key, t in transcripts.items()} == {
            (each.id, 0): undisturbed(each)[each.id, 0].token_ids for each in asked
        }
        assert sum(t.deltas[-1].stats.num_preemptions for t in transcripts.values()) == engine.stats.num_preemptions

    def test_when_the_noise_position_differs_then_so_do_the_tokens(self) -> None:
        tokens = undisturbed(request("r", max_tokens=40))["r", 0].token_ids

        assert len(set(tokens)) > 5

    def test_when_nothing_is_asked_then_a_step_says_nothing(self) -> None:
        engine = engine_over(checking_model())

        assert engine.is_idle
        assert engine.advance() == []

    def test_when_an_id_comes_again_then_the_older_request_says_nothing_more(self) -> None:
        engine = engine_over(checking_model())
        engine.add([request("r", "the old one", max_tokens=9)])
        engine.advance()

        engine.add([request("r", "the new one", max_tokens=3)])

        assert run(engine)["r", 0].token_ids == undisturbed(request("r", "the new one", max_tokens=3))["r", 0].token_ids

    def test_when_an_id_comes_twice_at_once_then_the_later_request_runs_alone(self) -> None:
        engine = engine_over(checking_model())

        engine.add([request("r", "the old one", max_tokens=9), request("r", "the new one", max_tokens=3)])

        assert run(engine)["r", 0].token_ids == undisturbed(request("r", "the new one", max_tokens=3))["r", 0].token_ids

    def test_when_they_are_measured_then_the_first_delta_knows_when_it_was_scheduled(self) -> None:
        engine = LLMEngine(checking_model(), NullTokenizer(), EngineConfig(), clock=lambda: 12.5)
        engine.add([request("r", "hello", max_tokens=1)])

        (delta,) = engine.advance()

        assert delta.stats.first_scheduled_s == 12.5
        assert delta.stats.num_prompt_tokens == 5


class TestGivenSeveralChoices:
    def test_when_they_run_then_each_says_its_own_and_they_share_the_prompt(self) -> None:
        model = checking_model()
        engine = engine_over(model)
        engine.add([request("r", b"p" * 40, num_choices=3, max_tokens=4)])

        transcripts = run(engine)

        assert sorted(transcripts) == [("r", 0), ("r", 1), ("r", 2)]
        assert len({tuple(t.token_ids) for t in transcripts.values()}) == 3
        assert transcripts["r", 2].deltas[0].stats.num_cached_tokens == 39
        assert model.num_computed_tokens == 40 + 2 + 3 * 3

    def test_when_one_was_finished_before_then_only_the_others_continue(self) -> None:
        asked = request(
            "r",
            num_choices=2,
            max_tokens=4,
            progress=(ChoiceProgress(token_ids=(97,), is_finished=True), ChoiceProgress()),
        )
        engine = engine_over(checking_model())

        engine.add([asked])

        assert list(run(engine)) == [("r", 1)]


class TestGivenAnEndOfSequence:
    """The model ends each sequence after three tokens or so."""

    def test_when_it_is_drawn_then_the_output_stops_and_it_has_no_text(self) -> None:
        output = undisturbed(request("r", max_tokens=500), mean_output_tokens=5)["r", 0]

        assert output.finish is not None
        assert (output.finish.reason, output.finish.stop) == (FinishReason.STOP, None)
        assert output.token_ids[-1] == END_OF_SEQUENCE
        assert output.text == bytes(output.token_ids[:-1]).decode()

    def test_when_it_is_ignored_then_the_output_continues(self) -> None:
        output = undisturbed(request("r", max_tokens=50, ignore_eos=True), mean_output_tokens=3)["r", 0]

        assert output.finish is not None
        assert output.finish.reason is FinishReason.LENGTH
        assert END_OF_SEQUENCE in output.token_ids[:-1]

    def test_when_it_comes_before_min_tokens_then_it_is_not_taken(self) -> None:
        output = undisturbed(request("r", max_tokens=200, min_tokens=30), mean_output_tokens=3)["r", 0]

        assert len(output.token_ids) >= 30
        assert output.finish is not None
        assert output.finish.reason is FinishReason.STOP


class TestGivenStops:
    def test_when_a_stop_token_is_drawn_then_it_is_named_and_has_no_text(self) -> None:
        free = undisturbed(request("r", max_tokens=30))["r", 0]
        stop = free.token_ids[10]
        first = free.token_ids.index(stop)

        output = undisturbed(request("r", max_tokens=30, stop_token_ids=(stop,)))["r", 0]

        assert output.token_ids == free.token_ids[: first + 1]
        assert output.text == free.text[:first]
        assert output.finish is not None
        assert (output.finish.reason, output.finish.stop) == (FinishReason.STOP, stop)

    def test_when_a_stop_string_is_complete_then_its_tokens_are_said_and_its_text_is_not(self) -> None:
        free = undisturbed(request("r", max_tokens=30))["r", 0]
        stop = free.text[10:13]
        begin = free.text.index(stop)

        output = undisturbed(request("r", max_tokens=30, stop=("never", stop)))["r", 0]

        assert output.token_ids == free.token_ids[: begin + 3]
        assert output.text == free.text[:begin]
        assert output.finish is not None
        assert (output.finish.reason, output.finish.stop) == (FinishReason.STOP, stop)

    def test_when_the_output_ends_within_what_could_be_a_stop_then_it_is_released(self) -> None:
        free = undisturbed(request("r", max_tokens=5))["r", 0]

        output = undisturbed(request("r", max_tokens=5, stop=(free.text + "more",)))["r", 0]

        assert [delta.text for delta in output.deltas] == ["", "", "", "", free.text]

    def test_when_max_tokens_are_drawn_then_it_ends_by_length(self) -> None:
        output = undisturbed(request("r", max_tokens=7))["r", 0]

        assert output.finish is not None
        assert (len(output.token_ids), output.finish.reason) == (7, FinishReason.LENGTH)

    def test_when_the_model_can_read_no_more_then_it_ends_by_length(self) -> None:
        output = undisturbed(request("r", b"p" * 10, max_tokens=6), max_model_len=16)["r", 0]

        assert output.finish is not None
        assert (len(output.token_ids), output.finish.reason) == (6, FinishReason.LENGTH)


class TestGivenTwoEnginesOverOneModel:
    def test_when_both_run_then_their_sequences_have_different_ids(self) -> None:
        model = checking_model()
        first, second = engine_over(model), engine_over(model)
        for engine in (first, second):
            engine.add([request("r", b"abc", max_tokens=2, num_choices=2)])

        ids = [id for engine in (first, second) for id in engine._outputs.sequence_ids]  # pyright: ignore[reportPrivateUsage]

        assert len(set(ids)) == 4


class TestGivenARequestThatWasRunningElsewhere:
    @pytest.mark.parametrize("num_tokens", range(1, 12))
    def test_when_it_goes_on_then_tokens_and_text_continue_where_they_were(self, num_tokens: int) -> None:
        asked = request("r", max_tokens=12, stop=("zzz", "q"))
        model = checking_model(alphabet=JUNK)
        engine = engine_over(model)
        engine.add([asked])
        whole = run(engine)["r", 0]
        resumed = "".join(delta.text for delta in whole.deltas[:num_tokens])

        engine.add(
            [
                Request(
                    id="r",
                    prompt_token_ids=asked.prompt_token_ids,
                    sampling=asked.sampling,
                    progress=(ChoiceProgress(token_ids=tuple(whole.token_ids[:num_tokens])),),
                )
            ]
        )
        deltas = [delta for _ in range(12 - num_tokens) for delta in engine.advance()]

        assert deltas[0].start == num_tokens
        assert [t for delta in deltas for t in delta.token_ids] == whole.token_ids[num_tokens:]
        assert resumed + "".join(delta.text for delta in deltas) == whole.text
        assert deltas[0].stats.num_resumed_tokens == num_tokens

    def test_when_its_tokens_were_all_said_then_it_ends_without_a_step(self) -> None:
        model = checking_model()
        engine = engine_over(model)
        engine.add([resumed(request("r", max_tokens=5), num_tokens=5)])

        (delta,) = engine.advance()

        assert (delta.start, delta.token_ids) == (5, ())
        assert delta.finish is not None
        assert delta.finish.reason is FinishReason.LENGTH
        assert model.num_computed_tokens == 0
        assert engine.is_idle

    def test_when_it_ends_at_once_then_the_text_that_was_held_back_is_released(self) -> None:
        text = undisturbed(request("r", max_tokens=5))["r", 0].text
        engine = engine_over(checking_model())
        engine.add([resumed(request("r", max_tokens=5, stop=(text[2:] + "more",)), num_tokens=5)])

        (delta,) = engine.advance()

        assert delta.text == text[2:]

    def test_when_the_worker_now_is_smaller_then_it_is_rejected_where_it_stands(self) -> None:
        asked = resumed(request("r", b"p" * 10, max_tokens=20), num_tokens=3)
        engine = engine_over(checking_model(max_model_len=8))

        engine.add([asked])
        (delta,) = engine.advance()

        assert delta.start == 3
        assert delta.finish is not None
        assert delta.finish.is_rejection


class TestGivenABadRequest:
    def test_when_it_comes_among_good_ones_then_it_alone_is_rejected(self) -> None:
        engine = engine_over(checking_model())

        engine.add([request("good", max_tokens=2), request("bad", ""), request("also good", max_tokens=2)])
        transcripts = run(engine)

        bad = transcripts["bad", 0].finish
        assert bad is not None
        assert (bad.reason, bad.is_rejection, bad.error) == (FinishReason.ERROR, True, "the prompt has no tokens")
        assert len(transcripts["good", 0].token_ids) == len(transcripts["also good", 0].token_ids) == 2

    @pytest.mark.parametrize("token_id", [-1, 257, 2**40])
    def test_when_what_was_said_of_it_cannot_be_then_it_is_rejected_where_it_stands(self, token_id: int) -> None:
        asked = request("bad", max_tokens=5, progress=(ChoiceProgress(token_ids=(97, token_id)),))
        tokenizer = Tokenizer(byte_level_backend(), TokenizerFacts(special_tokens={}))
        engine = LLMEngine(checking_model(), tokenizer, EngineConfig())

        engine.add([asked])
        (delta,) = engine.advance()

        assert delta.start == 2
        assert delta.finish is not None
        assert delta.finish.is_rejection

    def test_when_it_can_never_fit_then_both_numbers_are_named(self) -> None:
        engine = engine_over(checking_model(num_blocks=4, block_size=4))

        engine.add([request("large", b"p" * 10, max_tokens=8)])
        (delta,) = engine.advance()

        assert delta.finish is not None
        assert delta.finish.error is not None
        assert "18 tokens" in delta.finish.error
        assert "16" in delta.finish.error

    def test_when_it_just_fits_then_it_runs(self) -> None:
        engine = engine_over(checking_model(num_blocks=4, block_size=4))

        engine.add([request("large", b"p" * 10, max_tokens=7)])

        assert len(run(engine)["large", 0].token_ids) == 7


class TestGivenRunningRequests:
    def started(self, num_requests: int = 3) -> tuple[LLMEngine, Transcripts]:
        engine = engine_over(checking_model(), max_num_seqs=2)
        engine.add([request(f"r{n}", max_tokens=10, seed=n) for n in range(num_requests)])
        transcripts: Transcripts = {}
        note(transcripts, engine.advance())
        return engine, transcripts

    def test_when_they_are_aborted_then_each_says_so_once_and_its_blocks_are_free(self) -> None:
        engine, transcripts = self.started()

        engine.abort(["r0", "r2", "unknown", "r0"])
        note(transcripts, engine.advance())

        for request_id in ("r0", "r2"):
            finish = transcripts[request_id, 0].finish
            assert finish is not None
            assert finish.reason is FinishReason.ABORTED
        engine.check_invariants()
        assert engine.stats.num_running == 1

    def test_when_they_are_dropped_then_they_say_nothing_more(self) -> None:
        engine, _ = self.started()

        engine.drop(["r0", "r1", "r2"])

        assert engine.is_idle
        assert engine.advance() == []
        assert engine.stats.kv_tokens_used == 0

    def test_when_one_is_aborted_and_then_dropped_then_it_says_nothing(self) -> None:
        engine, _ = self.started(1)

        engine.abort(["r0"])
        engine.drop(["r0"])

        assert engine.advance() == []

    def test_when_somebody_asks_what_they_do_then_each_has_a_line(self) -> None:
        engine, _ = self.started()

        assert engine.describe() == [
            "r0/0 running: 5 prompt + 1 output tokens, 5 computed, 2 blocks, 0 preemptions",
            "r1/0 running: 5 prompt + 1 output tokens, 5 computed, 2 blocks, 0 preemptions",
            "r2/0 waiting: 5 prompt + 0 output tokens, 0 computed, 0 blocks, 0 preemptions",
        ]


class TestGivenAnEarlierAttemptThatGeneratedAll:
    @pytest.mark.parametrize("num_choices", [1, 2])
    def test_when_the_prompt_is_read_then_it_is_read_again_before_the_end(self, num_choices: int) -> None:
        asked = request("r", b"prompt", max_tokens=4, prompt_logprobs=1, ignore_eos=True, num_choices=num_choices)
        calm = undisturbed(asked)
        progress = [ChoiceProgress(token_ids=tuple(calm["r", choice].token_ids)) for choice in range(num_choices)]
        engine = engine_over(checking_model())

        engine.add([replace(asked, progress=tuple(progress))])
        deltas = [delta for step in iter(engine.advance, []) for delta in step]

        assert [delta.finish for delta in deltas] == [Finish(reason=FinishReason.LENGTH)] * num_choices
        assert [(delta.start, delta.token_ids, delta.text) for delta in deltas] == [(4, (), "")] * num_choices
        [read] = [delta.prompt for delta in deltas if delta.prompt is not None]
        assert [read] == [delta.prompt for delta in calm["r", 0].deltas if delta.prompt is not None]


class TestGivenRoom:
    def test_when_nothing_runs_then_all_is_offered(self) -> None:
        engine = engine_over(checking_model(num_blocks=16, block_size=4))

        assert engine.room() == Room(kv_tokens=64, prefill_tokens=128, sequences=8)

    def test_when_something_waits_then_nothing_is_offered(self) -> None:
        engine = engine_over(checking_model())
        engine.add([request("r", max_tokens=4)])

        assert engine.room() == Room(kv_tokens=0, prefill_tokens=0, sequences=0)

    def test_when_something_runs_then_what_it_holds_and_owes_is_missing(self) -> None:
        engine = engine_over(checking_model(num_blocks=64, block_size=4))
        engine.add([request("r", b"p" * 100, max_tokens=4)])
        engine.advance()

        assert engine.room() == Room(kv_tokens=4 * 38, prefill_tokens=2 * 64 - 36, sequences=7)

    def test_when_the_next_token_is_the_last_then_its_place_and_blocks_are_offered(self) -> None:
        engine = engine_over(checking_model(num_blocks=16, block_size=4))
        engine.add([request("r", b"p" * 9, max_tokens=3, ignore_eos=True)])
        engine.advance()

        before, _ = engine.room(), engine.advance()

        assert before == Room(kv_tokens=4 * (16 - 3 - 1), prefill_tokens=127, sequences=7)
        assert engine.room() == Room(kv_tokens=4 * 16, prefill_tokens=127, sequences=8, num_coming=1)

    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_that_room_is_used_then_the_next_one_starts_in_the_step_after_the_last_token(self, lag: int) -> None:
        model = checking_model()
        engine = engine_over(lagging(model) if lag else model, max_num_seqs=1)
        given = deque(request(f"r{number}", max_tokens=number, ignore_eos=True) for number in (2, 3, 4))
        pulled, num_tokens = [given.popleft()], list[int]()

        while pulled or given or not engine.is_idle:
            num_places = engine.room().sequences - len(pulled)
            engine.add(pulled)
            # As the worker does: what is pulled while a step runs is added after it.
            pulled = [given.popleft()] if given and num_places > 0 else []
            num_tokens.append(len(engine.advance()))

        # With a step in flight, the first call after a start returns the tokens of none.
        assert num_tokens == [0] * lag + [1] * 2 + [0] * lag + [1] * 3 + [0] * lag + [1] * 4

    def test_when_pulls_take_steps_then_places_are_offered_ahead_and_none_stays_empty(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = engine_over(checking_model(), max_num_seqs=2)
        monkeypatch.setattr(Lookahead, "num_steps", 3)
        given = deque(request(f"r{number}", max_tokens=5 + number % 4, ignore_eos=True) for number in range(12))
        # What is asked for before a step arrives after the second one that follows it.
        coming, num_tokens = deque([[given.popleft(), given.popleft()], [], []]), list[int]()

        while given or any(coming) or not engine.is_idle:
            num_places = engine.room().sequences - sum(map(len, coming))
            engine.add(coming.popleft())
            coming.append([given.popleft() for _ in range(min(num_places, len(given)))])
            num_tokens.append(len(engine.advance()))

        while num_tokens[-1] < 2:
            num_tokens.pop()
        assert set(num_tokens) == {2}, "a place stayed empty beside a backlog"
        assert engine.stats.num_preemptions == 0

    def test_when_it_looks_ahead_then_places_of_ends_within_that_time_are_offered(self) -> None:
        engine = engine_over(checking_model(), max_num_seqs=2)
        engine.add([request("r", max_tokens=8, ignore_eos=True)])
        engine.advance()
        before = engine.room().sequences

        engine.look_ahead(10.0)

        assert (before, engine.room().sequences) == (1, 2)

    def test_when_parts_of_a_prompt_are_owed_then_its_place_is_not_offered(self) -> None:
        engine = engine_over(lagging(checking_model(num_blocks=64, block_size=4)))
        engine.add([replace(request("r", b"p" * 200, max_tokens=0), embed=Embed())])
        engine.advance()

        offered = [engine.room().sequences for _ in range(3) if engine.advance() == []]

        assert offered == [7, 7, 8]

    def test_when_one_that_ends_shares_blocks_then_these_are_not_offered(self) -> None:
        engine = engine_over(checking_model(num_blocks=16, block_size=4))
        engine.add([request("long", b"p" * 13, max_tokens=9, ignore_eos=True)])
        engine.advance()
        engine.add([request("ends", b"p" * 13, max_tokens=2, ignore_eos=True)])
        engine.advance()

        # Four blocks stay with the first, and one is spared for its growth.
        assert engine.room() == Room(kv_tokens=4 * (16 - 4 - 1), prefill_tokens=126, sequences=7, num_coming=1)


class TestGivenACachedPrefix:
    def test_when_the_same_prompt_comes_again_then_only_its_end_is_computed(self) -> None:
        model = checking_model()
        engine = engine_over(model)
        engine.add([request("first", b"p" * 21, max_tokens=1)])
        run(engine)

        engine.add([request("again", b"p" * 21, max_tokens=1)])
        transcripts = run(engine)

        assert transcripts["again", 0].deltas[0].stats.num_cached_tokens == 20
        assert model.num_computed_tokens == 22
        assert (engine.stats.num_prompt_tokens, engine.stats.num_cached_tokens) == (42, 20)

    def test_when_a_chat_goes_on_then_only_what_is_new_is_computed(self) -> None:
        model = checking_model()
        engine = engine_over(model)
        first = request("first", b"p" * 21, max_tokens=6, ignore_eos=True)
        engine.add([first])
        answer = run(engine)["first", 0].token_ids
        num_before = model.num_computed_tokens

        second = request("second", bytes([*first.prompt_token_ids, *answer, *b"more"]), max_tokens=9)
        engine.add([second])
        transcripts = run(engine)

        # Of the answer, its last token is as new as the rest.
        assert model.num_computed_tokens - num_before == 1 + len(b"more") + 9 - 1
        assert transcripts["second", 0].token_ids == undisturbed(second)["second", 0].token_ids

    def test_when_the_salt_differs_then_it_is_computed_again(self) -> None:
        model = checking_model()
        engine = engine_over(model)

        for tenant in ("one", "another"):
            engine.add([request(tenant, b"p" * 21, max_tokens=1, cache_salt=tenant)])
            run(engine)

        assert model.num_computed_tokens == 42


class TestGivenSettingsThatContradictEachOther:
    def test_when_an_engine_is_made_then_it_says_which(self) -> None:
        with pytest.raises(ValueError, match="max_num_batched_tokens"):
            LLMEngine(
                NullModel(NullModelConfig()),
                NullTokenizer(),
                EngineConfig(max_num_seqs=64, max_num_batched_tokens=8),
            )
