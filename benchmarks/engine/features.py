"""What each option costs: `python -m benchmarks features [MODEL]`, on this CPU, with the bare engine.

The same load without the option and with it, in turns: 32 requests of 64 prompt and 64 output tokens, 16 at once,
sampled at temperature 1 with a seed each. Each ratio is the median of the rounds' (throughput: less is worse; times:
more is worse). TTFT is the time from a request's submission to its first token, TPOT the time of each further one.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.engine.models import NAMES, VOCAB_SIZE, model_folder
from benchmarks.tables import table
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Grammar, Request, Sampling
from sluice.engine.text.tokenizer import load_tokenizer

NUM_REQUESTS, NUM_AT_ONCE, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 16, 64, 64

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
BIAS = dict.fromkeys(range(300, 400), -1.0)
WORDS = Grammar(kind="regex", text="([a-z]{1,9} ){400}")
FEATURES: Mapping[str, Mapping[str, object]] = {
    "nothing": {},
    "temperature 0": {"temperature": 0.0},
    "top_k, top_p, min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": PENALTIES,
    "logprobs 5": {"logprobs": 5},
    "penalties and logprobs": {**PENALTIES, "logprobs": 5},
    "logit_bias of 100": {"logit_bias": BIAS},
    "min_tokens": {"min_tokens": 60},
    "four stop strings": {"stop": ("qzxj", "jjqz", "\n\n\n\n\n\n", "ĦĦĦ")},
    "grammar": {"grammar": WORDS},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
}


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the load took."""

    tokens_per_s: float
    ttft_s: float
    tpot_s: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", nargs="?", default="smollm2", help=f"a folder, or one of {', '.join(NAMES)} (default: smollm2)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in turns (default 5)")
    parser.add_argument("--only", action="append", choices=[*FEATURES], help="this option alone; may be repeated")
    arguments = parser.parse_args()
    folder = model_folder(arguments.model) if arguments.model in NAMES else Path(arguments.model)
    options = ModelOptions(path=folder, num_blocks=NUM_AT_ONCE * 16, max_model_len=256, max_num_seqs=NUM_AT_ONCE)
    config = EngineConfig(max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=1024, enable_prefix_caching=False)
    engine = LLMEngine(load_model_runner(options), load_tokenizer(folder), config)
    for name in ("nothing", "grammar"):
        _run(engine, FEATURES[name], f"warm-up {name}")
    rows: list[list[object]] = [["option", "tokens/s", "without: 1", "TTFT", "without: 1", "TPOT", "without: 1"]]
    for name in arguments.only or FEATURES:
        feature = FEATURES[name]
        # In pairs: what the machine does meanwhile meets both alike.
        pairs = [
            (_run(engine, {}, f"plain {name} {number}"), _run(engine, feature, f"{name} {number}"))
            for number in range(arguments.rounds)
        ]
        rows.append([name, *_cells(pairs)])
    print(table(rows))


def _run(engine: LLMEngine, feature: Mapping[str, object], name: str) -> Load:
    """Run the load."""
    random, began_s = Random(name), time.perf_counter()
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    num_tokens: dict[str, int] = {}
    requests = [_request(feature, f"{name} {number}", random) for number in range(NUM_REQUESTS)]
    engine.add(requests)
    while not engine.is_idle:
        deltas, now_s = engine.advance(), time.perf_counter()
        for delta in deltas:
            assert delta.finish is None or delta.finish.error is None, f"{name}: {delta.finish}"
            if delta.token_ids:
                first_s.setdefault(delta.request_id, now_s)
                last_s[delta.request_id] = now_s
                num_tokens[delta.request_id] = num_tokens.get(delta.request_id, 0) + len(delta.token_ids)
    taken_s = time.perf_counter() - began_s
    further = [(last_s[one] - first_s[one]) / (count - 1) for one, count in num_tokens.items() if count > 1]
    return Load(sum(num_tokens.values()) / taken_s, median(first_s.values()) - began_s, median(further))


def _request(feature: Mapping[str, object], name: str, random: Random) -> Request:
    prompt = tuple(random.randrange(300, VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS))
    plain = Sampling(seed=random.getrandbits(32), max_tokens=NUM_OUTPUT_TOKENS, ignore_eos="grammar" not in feature)
    of_request = {key: value for key, value in feature.items() if key == "grammar"}
    of_sampling = {key: value for key, value in feature.items() if key not in of_request}
    sampling = replace(plain, **of_sampling)  # pyright: ignore[reportArgumentType] - options of several types
    return replace(Request(id=name, prompt_token_ids=prompt, sampling=sampling), **of_request)  # pyright: ignore[reportArgumentType] - as above


def _cells(pairs: list[tuple[Load, Load]]) -> list[str]:
    with_it = [one for _, one in pairs]
    speed = median(one.tokens_per_s / other.tokens_per_s for other, one in pairs)
    ttft = median(one.ttft_s / other.ttft_s for other, one in pairs)
    tpot = median(one.tpot_s / other.tpot_s for other, one in pairs)
    return [
        f"{median(one.tokens_per_s for one in with_it):.0f}",
        f"{speed:.3f}",
        f"{1e3 * median(one.ttft_s for one in with_it):.0f} ms",
        f"{ttft:.3f}",
        f"{1e3 * median(one.tpot_s for one in with_it):.1f} ms",
        f"{tpot:.3f}",
    ]


if __name__ == "__main__":
    main()
