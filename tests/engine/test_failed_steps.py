"""Steps that fail once or lack memory, beside preemptions, drafts and saves: what a failure leaves for later steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import pytest

from sluice.engine.batch import Batch
from sluice.engine.errors import OutOfMemory
from sluice.engine.executor import Executor, Launched
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig
from sluice.engine.request import FailureKind, Request
from tests.engine.given import (
    CheckingModel,
    Prophet,
    Transcripts,
    checking_model,
    engine_over,
    lagging,
    note,
    request,
    run,
    undisturbed,
)


class Wrapped(ABC):
    """An executor around another one, some of whose launches fail."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.limits, self.lag, self.fingerprint = executor.limits, executor.lag, executor.fingerprint
        self.num_launches = self.num_failures = 0

    @abstractmethod
    def fails(self, batch: Batch) -> Exception | None:
        """Return the error of this launch."""

    def launch(self, batch: Batch) -> Launched:
        self.num_launches += 1
        if (error := self.fails(batch)) is not None:
            self.num_failures += 1
            raise error
        return self._executor.launch(batch)


class FailsOnce(Wrapped):
    """One launch fails."""

    def __init__(self, executor: Executor, at: int) -> None:
        super().__init__(executor)
        self._at = at

    def fails(self, batch: Batch) -> Exception | None:
        return RuntimeError("once") if self.num_launches == self._at else None


class HasMemoryFor(Wrapped):
    """Every step of more tokens lacks memory."""

    def __init__(self, executor: Executor, num_tokens: int) -> None:
        super().__init__(executor)
        self._num_tokens = num_tokens

    def fails(self, batch: Batch) -> Exception | None:
        return OutOfMemory("too large") if batch.num_tokens > self._num_tokens else None


class GathersFew(Wrapped):
    """Steps with more than so many new saves lack memory; the first three with any that fill a step do, too."""

    def __init__(self, executor: Executor, most: int) -> None:
        super().__init__(executor)
        self._most = most
        self._last = 0

    def fails(self, batch: Batch) -> Exception | None:
        num_new = sum(save.number > self._last for save in batch.saves)
        if num_new > self._most or (num_new >= 32 and self.num_failures < 3):
            return OutOfMemory("no memory to gather blocks")
        self._last = max([self._last, *(save.number for save in batch.saves)])
        return None


def expected(asked: Iterable[Request]) -> Transcripts:
    """What each gives alone."""
    whole: Transcripts = {}
    for one in asked:
        whole |= undisturbed(one)
    return whole


def finish(engine: LLMEngine, said: Transcripts) -> None:
    """Step until nothing is left to do, and note what is said."""
    for _ in range(10_000):
        if engine.is_idle:
            return
        note(said, engine.advance())
        engine.check_invariants()
    raise AssertionError("still busy")


def outputs(transcripts: Transcripts) -> dict[Any, Any]:
    return {key: (one.token_ids, one.finish) for key, one in transcripts.items()}


class TestGivenAPreemptedSequenceThatJoinsAgainInItsSlot:
    """While the step after its preemption, which has the write of its old block table, is in flight."""

    @pytest.mark.parametrize("num_blocks", [14, 15, 16, 17, 18])
    def test_when_that_step_is_tried_again_then_tokens_are_those_undisturbed(self, num_blocks: int) -> None:
        asked = [
            request("Y", b"y" * 5, max_tokens=40, seed=3),
            request("Z", b"z" * 20, max_tokens=5),
            request("A", b"a" * 9, max_tokens=30, seed=1),
        ]
        higher = request("H", b"h" * 24, max_tokens=12, seed=2, priority=1)
        model = CheckingModel(NullModelConfig(num_blocks=num_blocks, block_size=4))
        engine = engine_over(FailsOnce(lagging(model), at=6), max_num_seqs=4)
        said: Transcripts = {}
        engine.add(asked)
        for _ in range(5):
            note(said, engine.advance())

        engine.add([higher])
        finish(engine, said)

        assert outputs(said) == outputs(expected([*asked, higher]))


class TestGivenDraftsForWhichThereIsNoMemory:
    @pytest.mark.parametrize("lag", [0, 1])
    def test_when_sequences_generate_then_drafts_are_tried_now_and_then_only(self, lag: int) -> None:
        asked = [request(f"r{n}", f"prompt {n}", max_tokens=100, seed=n) for n in range(4)]
        alone = expected(asked)
        model = checking_model(num_blocks=400)
        device = HasMemoryFor(lagging(model) if lag else model, 40)
        engine = engine_over(device, draft_source=Prophet(alone, 1.0, depth=12))
        engine.add(asked)

        assert outputs(run(engine)) == outputs(alone)
        assert 0 < device.num_failures < 10


class TestGivenSavesThatLackMemory:
    def test_when_steps_become_smaller_then_saves_are_given_up_and_no_request_fails(self) -> None:
        asked = [request(f"r{n}", bytes([97 + n]) * 100, max_tokens=90, seed=n) for n in range(6)]
        higher = request("H", b"H" * 300, max_tokens=20, seed=9, priority=1)
        device = GathersFew(NullModel(NullModelConfig(num_blocks=500, block_size=1, num_host_blocks=800)), 40)
        engine = engine_over(device)
        said: Transcripts = {}
        engine.add(asked)
        for _ in range(30):
            note(said, engine.advance())
        engine.add([higher])

        finish(engine, said)

        assert device.num_failures
        assert not [one.finish for one in said.values() if one.finish is None or one.finish.error]


class TestGivenAnErrorOfTheOperatingSystem:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (OSError(5, "Input/output error"), FailureKind.FILE),
            (TimeoutError(), FailureKind.STEP),
            (ConnectionResetError(), FailureKind.STEP),
            (BrokenPipeError(), FailureKind.STEP),
        ],
        ids=repr,
    )
    def test_when_it_is_of_a_connection_then_no_file_is_lost(self, error: OSError, kind: FailureKind) -> None:
        assert FailureKind.of(error) is kind
