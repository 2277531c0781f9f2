"""What crosses the socket: deltas arrive as the engine made them."""

from random import Random

from sluice.engine.config import EngineConfig
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.null_model import NullModel, NullModelConfig, NullTokenizer
from sluice.engine.request import ChoiceProgress, Request, SamplingParams, TokenDelta
from sluice.worker.engine_process.messages import DeltaReader, packed

SMALL_CACHE = NullModelConfig(num_blocks=24, block_size=4, max_model_len=64)


def requests(seed: int) -> list[Request]:
    """Of every kind: several choices, resumed ones, log-probabilities, stop strings."""
    random = Random(seed)
    return [
        Request(
            id=f"r{number}",
            prompt_token_ids=tuple(random.randrange(1, 200) for _ in range(random.randrange(1, 12))),
            sampling=SamplingParams(
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
    def test_when_packed_and_read_then_they_are_the_same(self) -> None:
        for seed in range(20):
            reader = DeltaReader()
            for deltas in steps_of(seed):
                read = reader.read([*map(packed, deltas)])

                assert [one._replace(stats=two.stats) for one, two in zip(read, deltas, strict=True)] == deltas
                for one, two in zip(read, deltas, strict=True):
                    if two.finish is not None or two.start == two.stats.num_resumed_tokens:
                        assert one.stats == two.stats, "the worker reads those of a first and of a last delta"

    def test_when_all_have_ended_then_nothing_is_kept(self) -> None:
        reader = DeltaReader()
        for deltas in steps_of(1):
            reader.read([*map(packed, deltas)])
        assert reader.num_kept == 0


class TestGivenARequestThatIsForgotten:
    """Its deltas were on their way when the worker lost it."""

    def test_when_they_arrive_then_they_are_left_out_and_those_of_others_are_not(self) -> None:
        reader, steps = DeltaReader(), steps_of(2)
        reader.read([*map(packed, steps[0])])
        gone = steps[1][0].request_id
        reader.forget([gone])

        read = reader.read([*map(packed, steps[1])])

        kept = [one for one in steps[1] if one.request_id != gone or one.finish is not None]
        assert [one[:5] for one in read] == [one[:5] for one in kept]
        assert len(kept) < len(steps[1])
