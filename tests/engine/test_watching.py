"""What a watched engine tells of its iterations agrees with what it does, and watching changes nothing."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Request
from sluice.engine.watching import Computing, Iteration, Left
from tests.engine.given import Transcripts, checking_model, engine_over, lagging, request, run
from tests.examples import examples

prompts = st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=8)


def asked_of(texts: list[str]) -> list[Request]:
    return [request(f"r{n}", text, max_tokens=1 + 3 * n, seed=n, num_choices=1 + n % 2) for n, text in enumerate(texts)]


def engine_of(num_blocks: int, num_tokens: int, *, is_lagging: bool) -> LLMEngine:
    model = checking_model(num_blocks=num_blocks, mean_output_tokens=9)
    return engine_over(lagging(model) if is_lagging else model, max_num_seqs=4, max_num_batched_tokens=num_tokens)


def check_sums(engine: LLMEngine, seen: list[Iteration], transcripts: Transcripts) -> None:
    """Everyone joins once more than it is preempted, and leaves once, for its own reason.

    One that is preempted while its last token is in flight ends without joining again.
    """
    names = {f"{request_id}/{choice}" for request_id, choice in transcripts}
    joins = Counter(one.name for iteration in seen for one in iteration.joined)
    preemptions = Counter(name for iteration in seen for name in iteration.preempted)
    ended = {name for iteration in seen for name in iteration.preempted if name in {one.name for one in iteration.left}}
    assert {name: joins[name] - preemptions[name] for name in names} == {name: int(name not in ended) for name in names}
    assert preemptions.total() == engine.stats.num_preemptions
    left = [one for iteration in seen for one in iteration.left]
    ends = {f"{key[0]}/{key[1]}": one.finish.reason for key, one in transcripts.items() if one.finish}
    assert dict(left) == ends
    assert len(left) == len(names)


def check_each(seen: list[Iteration]) -> None:
    """Each is within its bounds, and each row goes on where the last one of its sequence ended."""
    ends: dict[str, int] = {}
    for number, iteration in enumerate(seen, start=1):
        assert iteration.number == number
        assert iteration.num_tokens <= iteration.max_tokens
        assert 0 <= iteration.num_free_blocks <= iteration.num_blocks
        for row in iteration.running:
            assert row.start == ends[row.name]
        for row in (*iteration.joined, *iteration.running):
            ends[row.name] = row.start + row.num_tokens
            assert ends[row.name] <= 4 * row.num_blocks
        assert not set(iteration.waiting) & {row.name for row in (*iteration.joined, *iteration.running)}


class TestGivenAnyRequests:
    @given(texts=prompts, num_blocks=st.integers(14, 40), num_tokens=st.integers(5, 40), is_lagging=st.booleans())
    # The last is preempted while its last token is in flight.
    @example(texts=[*"aaaaa", "aaaaaaaabaaba", "aaaaaaaaa"], num_blocks=14, num_tokens=5, is_lagging=True)
    @settings(max_examples=examples(60), deadline=None)
    def test_when_an_engine_is_watched_then_it_does_the_same_and_tells_all(
        self, texts: list[str], num_blocks: int, num_tokens: int, is_lagging: bool
    ) -> None:
        plain, watched = (engine_of(num_blocks, num_tokens, is_lagging=is_lagging) for _ in range(2))
        seen: list[Iteration] = []
        watched.watch(seen.append)
        plain.add(asked_of(texts))
        watched.add(asked_of(texts))

        expected, transcripts = run(plain), run(watched)

        assert {key: one.token_ids for key, one in transcripts.items()} == {
            key: one.token_ids for key, one in expected.items()
        }
        check_each(seen)
        assert sum(len(one.joined) + len(one.running) for one in seen) >= watched.stats.num_rows
        check_sums(watched, seen, transcripts)


class TestGivenAnEngineThatRuns:
    def test_when_it_is_watched_for_a_while_then_nothing_is_left_of_it(self) -> None:
        engine = engine_of(40, 40, is_lagging=False)
        engine.add([request("a", "hello", max_tokens=50, ignore_eos=True)])
        engine.advance()
        seen: list[Iteration] = []

        engine.watch(seen.append)
        engine.advance()
        engine.watch(None)
        engine.advance()

        assert [(one.joined, one.running) for one in seen] == [((), (Computing("a/0", 5, 1, 2),))]
        assert not engine.is_watched

    @pytest.mark.parametrize(("window_groups", "num_blocks"), [(0, 3), (2, 6 + 2 * 3)])
    def test_when_blocks_have_left_the_window_then_they_are_not_told(self, window_groups: int, num_blocks: int) -> None:
        engine = engine_over(checking_model(num_blocks=40, sliding_window=8, window_groups=window_groups))
        engine.add([request("a", "a" * 20, max_tokens=5, ignore_eos=True)])
        engine.advance()
        seen: list[Iteration] = []

        engine.watch(seen.append)
        engine.advance()

        # The token at 20, of the sixth block, attends from 13 on, in the fourth.
        assert [one.running for one in seen] == [(Computing("a/0", 20, 1, num_blocks),)]


class TestGivenAnIteration:
    def test_when_it_is_printed_then_it_has_a_line_for_each_group(self) -> None:
        iteration = Iteration(
            number=12, at_s=0.1034, took_s=0.0019, max_tokens=64, num_free_blocks=3, num_blocks=14,
            joined=(Computing("d/0", 32, 8, 3),), running=(Computing("a/0", 40, 1, 3), Computing("a/1", 17, 1, 2)),
            left=(Left("c/0", "stop"),), preempted=("e/0",), waiting=("e/0", "f/0"), num_waiting=9,
        )  # fmt: skip

        assert str(iteration).splitlines() == [
            "    12  at 0.103 s  1.9 ms  10 of 64 tokens  3 run  9 wait  3 of 14 blocks free",
            "        joins     d/0 8 from 32 in 3",
            "        runs      a/0 1 from 40 in 3, a/1 1 from 17 in 2",
            "        leaves    c/0 stop",
            "        preempted e/0",
            "        waits     e/0, f/0, 7 more",
        ]
