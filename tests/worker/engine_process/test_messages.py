"""What crosses the socket: deltas arrive as the engine made them."""

import socket
import struct
from multiprocessing.connection import Connection
from random import Random

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import ChoiceProgress, Request, Sampling, TokenDelta
from sluice.worker.engine_process.messages import StepReport, packed, receive, unpacked

SMALL_CACHE = NullModelConfig(num_blocks=24, block_size=4, max_model_len=64)


def requests(seed: int) -> list[Request]:
    """Of every kind: several choices, resumed ones, log-probabilities, stop strings."""
    random = Random(seed)
    return [
        Request(
            id=f"r{number}",
            prompt_token_ids=tuple(random.randrange(1, 200) for _ in range(random.randrange(1, 12))),
            sampling=Sampling(
                max_tokens=random.randrange(5, 30), seed=number, logprobs=random.choice([None, 2]), stop=("a",)
            ),
            num_choices=num_choices,
            progress=tuple(ChoiceProgress(token_ids=(65,) * random.randrange(4)) for _ in range(num_choices)),
        )
        for number, num_choices in enumerate(random.choices([1, 2, 3], k=12))
    ]


def steps_of(seed: int) -> list[list[TokenDelta]]:
    """All steps of an engine whose cache is too small, so that it preempts."""
    engine = LLMEngine(NullModel(SMALL_CACHE), NullTokenizer(), EngineConfig(max_num_seqs=8))
    engine.add(requests(seed))
    steps: list[list[TokenDelta]] = []
    while not engine.is_idle:
        steps.append(engine.advance())
    return steps


class TestGivenTheDeltasOfAnEngine:
    def test_when_packed_and_unpacked_then_they_are_the_same(self) -> None:
        for delta in [delta for seed in range(20) for deltas in steps_of(seed) for delta in deltas]:
            made = unpacked(packed(delta))

            assert made._replace(stats=delta.stats) == delta
            if delta.finish is not None or delta.start == delta.stats.num_resumed_tokens:
                assert made.stats == delta.stats, "the worker reads those of a first and of a last delta"


class TestGivenAProcessThatIsKilledAmidAMessage:
    def test_when_its_message_is_received_then_the_process_has_ended(self) -> None:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            theirs.sendall(struct.pack("!i", 1000) + b"the first bytes")
            theirs.close()

            with pytest.raises(EOFError):
                receive(connection, StepReport)
