"""The Python of a step depends on the rows of the step: not on what waits, nor on how long the contexts are.

Work is counted in bytecodes, which are the same in every run, so nothing here depends on the machine's speed.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig
from tests.engine.given import engine_over, request

NUM_RUNNING = 4
BLOCK_SIZE = 16


def bytecodes(call: Callable[[], object]) -> int:
    """Return how many bytecodes `call` executes."""
    num_executed = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_executed += event == "opcode"
        return count

    before = sys.gettrace()
    # A collection would add the bytecodes of its callbacks: hypothesis has one.
    gc.disable()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return num_executed


def engine_that_generates(*, num_waiting: int = 0, num_prompt_tokens: int = 32, policy: str = "fcfs") -> LLMEngine:
    """Return an engine whose places are taken by sequences that generate, while others wait."""
    engine = engine_over(
        NullModel(NullModelConfig(num_blocks=2048, block_size=BLOCK_SIZE)),
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=NUM_RUNNING * num_prompt_tokens,
        policy=policy,
    )
    lengths = [num_prompt_tokens] * NUM_RUNNING + [32] * num_waiting
    engine.add(
        request(f"r{n}", n.to_bytes(4, "little") * (length // 4), max_tokens=4000) for n, length in enumerate(lengths)
    )
    for _ in range(BLOCK_SIZE):
        engine.advance()
    assert engine.stats.num_running == NUM_RUNNING
    assert engine.stats.num_waiting == num_waiting
    return engine


def work_of_steps(engine: LLMEngine) -> int:
    """Return the work of as many steps as fill a block of each sequence, each with what a worker asks before it."""

    def turns() -> None:
        for _ in range(BLOCK_SIZE):
            assert engine.idle_s == 0
            engine.room()
            engine.advance()
            assert engine.stalled() == []

    return bytecodes(turns)


class TestGivenAFullEngine:
    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_when_a_thousand_times_as_many_wait_then_a_step_does_the_same_work(self, policy: str) -> None:
        few, many = (engine_that_generates(num_waiting=n, policy=policy) for n in (2, 2000))

        assert work_of_steps(many) == work_of_steps(few)

    def test_when_contexts_are_a_hundred_times_as_long_then_a_step_does_the_same_work(self) -> None:
        short, long = (engine_that_generates(num_prompt_tokens=n) for n in (32, 3200))

        assert work_of_steps(long) == work_of_steps(short)

    def test_when_one_of_a_thousand_times_as_many_is_cancelled_then_it_costs_the_same(self) -> None:
        few, many = (engine_that_generates(num_waiting=n) for n in (3, 3000))

        def cancel(engine: LLMEngine) -> None:
            engine.abort([f"r{NUM_RUNNING + 1}"])
            engine.advance()

        assert bytecodes(lambda: cancel(many)) == bytecodes(lambda: cancel(few))


class TestGivenAFullCache:
    """One sequence generates, and another one with the same prompt waits for a block."""

    @staticmethod
    def engine_with(num_prompt_tokens: int) -> LLMEngine:
        num_blocks = num_prompt_tokens // BLOCK_SIZE + 2
        engine = engine_over(
            NullModel(NullModelConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)),
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=num_prompt_tokens + NUM_RUNNING,
        )
        engine.add(request(f"r{n}", b"a" * num_prompt_tokens, max_tokens=2 * BLOCK_SIZE) for n in range(2))
        for _ in range(2):
            engine.advance()
        assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 1)
        return engine

    def test_when_its_cached_prompt_is_much_longer_then_a_step_does_the_same_work(self) -> None:
        short, long = (self.engine_with(n) for n in (32, 3200))

        assert bytecodes(long.advance) == bytecodes(short.advance)
