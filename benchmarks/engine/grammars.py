"""What grammars cost a step: `python -m benchmarks grammars MODEL`, on this CPU."""

import argparse
import time
from pathlib import Path
from random import Random
from statistics import median

from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Grammar, Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer

NUM_ROWS, NUM_STEPS, ROUNDS = 64, 24, 5
SCHEMA = Grammar(
    kind="json_schema",
    text='{"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": '
    '{"type": "string"}, "minItems": 40}, "score": {"type": "number"}}, "required": ["name", "tags", "score"]}',
)


def main() -> None:
    """Print the median step of 64 sequences, of which none, half or all have a grammar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    options = ModelOptions(path=folder, num_blocks=NUM_ROWS * 8, max_model_len=128, max_num_seqs=NUM_ROWS)
    config = EngineConfig(max_num_seqs=NUM_ROWS, max_num_batched_tokens=1024)
    engine = LLMEngine(load_model_runner(options), load_tokenizer(folder), config)
    for temperature in (0.0, 1.0):
        steps: dict[int, list[float]] = {0: [], NUM_ROWS // 2: [], NUM_ROWS: []}
        for number in range(ROUNDS):
            for num_constrained, taken in steps.items():
                taken += _steps(engine, num_constrained, temperature, number)
        plain = median(steps[0])
        for num_constrained, taken in steps.items():
            cost = 100 * (median(taken) / plain - 1)
            print(
                f"temperature {temperature:g}, {num_constrained:2} of {NUM_ROWS} rows with a grammar: "
                f"{1e3 * median(taken):.1f} ms a step ({cost:+.1f} %)"
            )


def _steps(engine: LLMEngine, num_constrained: int, temperature: float, seed: int) -> list[float]:
    """Return the seconds of steps in which all sequences decode."""
    random = Random(seed)
    requests = [
        Request(
            id=f"{num_constrained}-{temperature}-{seed}-{number}",
            prompt_token_ids=tuple(random.randrange(300, 1000) for _ in range(8)),
            sampling=Sampling(temperature=temperature, seed=number, max_tokens=100, min_tokens=0),
            grammar=SCHEMA if number < num_constrained else None,
        )
        for number in range(NUM_ROWS)
    ]
    engine.add(requests)
    while engine.stats.num_running < NUM_ROWS and not engine.is_idle:
        engine.advance()
    taken: list[float] = []
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        engine.advance()
        if engine.stats.num_running == NUM_ROWS:
            taken.append(time.perf_counter() - began_s)
    engine.drop([request.id for request in requests])
    return taken


if __name__ == "__main__":
    main()
