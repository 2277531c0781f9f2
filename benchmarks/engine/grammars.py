"""What grammars cost and save: `python -m benchmarks grammars [MODEL]`, on this CPU.

Three tables: the time until the first mask, the tokens per second of one extraction without forced tokens, with them,
and with drafts, and the step of 64 sequences of which none, half or all have a grammar, with forced tokens and without,
which costs tokens that others get for nothing, again with drafts. Rounds alternate; figures are medians, ratios of each
round's.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from benchmarks.engine.models import NAMES, model_folder
from sluice.engine.config import EngineConfig
from sluice.engine.execution.options import ModelOptions
from sluice.engine.execution.start.model_loading import load_model_runner
from sluice.engine.llm_engine import LLMEngine
from sluice.engine.request import Grammar, Request, Sampling
from sluice.engine.text import output
from sluice.engine.text.tokenizer import Tokenizer, load_tokenizer

NUM_ROWS, NUM_STEPS, ROUNDS, NUM_EXTRACTIONS = 64, 24, 5, 9
LISTS = Grammar(
    kind="json_schema",
    text='{"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": '
    '{"type": "string"}, "minItems": 40}, "score": {"type": "number"}}, "required": ["name", "tags", "score"]}',
)
EXTRACTION = Grammar(
    kind="json_schema",
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                "invoice_number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,6}$"},
                "invoice_date": {"type": "string", "format": "date"},
                "customer": {
                    "type": "object",
                    "properties": {
                        "company_name": {"type": "string", "maxLength": 40},
                        "contact_person": {"type": "string", "maxLength": 40},
                        "country_code": {"type": "string", "pattern": "^[A-Z]{2}$"},
                    },
                    "required": ["company_name", "contact_person", "country_code"],
                    "additionalProperties": False,
                },
                "currency": {"enum": ["EUR", "USD", "GBP", "CHF"]},
                "total_amount": {"type": "number"},
                "payment_status": {"enum": ["paid", "open", "overdue", "cancelled"]},
                "requires_human_review": {"type": "boolean"},
            },
            "required": [
                "invoice_number", "invoice_date", "customer", "currency", "total_amount", "payment_status",
                "requires_human_review",
            ],
            "additionalProperties": False,
        }
    ),
)  # fmt: skip
INVOICE = (
    "Invoice AB-20417 of 3 March 2024, issued to Northwind Traders (contact: Maria Anders, Germany), over 1,249.50 "
    "euro, was paid on time.\nThe same as JSON:\n"
)


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="smollm2", help=f"a folder, or one of {', '.join(NAMES)} (default: smollm2)"
    )
    name = parser.parse_args().model
    folder = model_folder(name) if name in NAMES else Path(name)
    options = ModelOptions(path=folder, num_blocks=NUM_ROWS * 24, max_model_len=384, max_num_seqs=NUM_ROWS)
    tokenizer = load_tokenizer(folder)
    runner = load_model_runner(options)
    config = EngineConfig(max_num_seqs=NUM_ROWS, max_num_batched_tokens=1024)
    engine = LLMEngine(runner, tokenizer, config)
    # As a worker on a CPU serves.
    guessing = LLMEngine(runner, tokenizer, replace(config, speculation="suffix"))
    _print_first_masks(engine)
    _print_extraction(engine, guessing, tokenizer)
    _print_steps(engine)
    print("With drafts:")
    _print_steps(guessing)


def _print_first_masks(engine: LLMEngine) -> None:
    """Print how long a request waits for its grammar: the first of an engine, one of a new grammar, and a known one."""
    cases = {
        "the first grammar": [LISTS],
        "a new grammar": [
            Grammar(kind="json_schema", text=EXTRACTION.text.replace("invoice", f"invoice{number}"))
            for number in range(20)
        ],
        "a known grammar": [LISTS] * 20,
    }
    for name, grammars in cases.items():
        taken = [_seconds_to_first_token(engine, f"{name} {n}", grammar) for n, grammar in enumerate(grammars)]
        plain = [_seconds_to_first_token(engine, f"{name} plain {n}", None) for n, _ in enumerate(grammars)]
        print(f"first token with {name}: {1e3 * (median(taken) - median(plain)):+.1f} ms")


def _seconds_to_first_token(engine: LLMEngine, name: str, grammar: Grammar | None) -> float:
    began_s = time.perf_counter()
    sampling = Sampling(temperature=0.0, max_tokens=1)
    engine.add([Request(id=name, prompt_token_ids=(300, 301), sampling=sampling, grammar=grammar)])
    while not engine.is_idle:
        engine.advance()
        if engine.stats.num_running == 0 and not engine.is_idle:
            time.sleep(min(engine.idle_s, 0.0002))
    return time.perf_counter() - began_s


def _print_extraction(engine: LLMEngine, guessing: LLMEngine, tokenizer: Tokenizer) -> None:
    """Print the speed of one sequence that extracts: each token drawn, forced ones added, and with drafts.

    Each extraction has a cache salt of its own, so none is a draft of another.
    """
    prompt = tuple(tokenizer.encode(INVOICE, add_special_tokens=False))
    most = output.MAX_FORCED_TOKENS
    kinds = {"each token drawn": (engine, 0), "forced ones added": (engine, most), "and drafts": (guessing, most)}
    for temperature in (0.0, 0.7):
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        num_steps = dict.fromkeys(kinds, 0)
        for seed in range(NUM_EXTRACTIONS):
            for kind, (one, num_forced) in kinds.items():
                output.MAX_FORCED_TOKENS = num_forced
                before = one.stats.num_steps
                speeds[kind].append(_tokens_per_s(one, prompt, temperature, seed))
                num_steps[kind] += one.stats.num_steps - before
        output.MAX_FORCED_TOKENS = most
        print(f"temperature {temperature:g}, one extraction, {NUM_EXTRACTIONS} of them:")
        drawn = speeds["each token drawn"]
        for kind, found in speeds.items():
            ratio = median(one / plain for one, plain in zip(found, drawn, strict=True))
            print(f"  {kind}: {median(found):.0f} tokens/s ({ratio:.2f} times), {num_steps[kind]} steps")


def _tokens_per_s(engine: LLMEngine, prompt: tuple[int, ...], temperature: float, seed: int) -> float:
    name = f"extraction {temperature}-{seed}"
    sampling = Sampling(temperature=temperature, seed=seed, max_tokens=250)
    request = Request(id=name, prompt_token_ids=prompt, sampling=sampling, grammar=EXTRACTION, cache_salt=name)
    engine.add([request])
    began_s, num_tokens = 0.0, 0
    while not engine.is_idle:
        deltas = engine.advance()
        if num_tokens or not deltas:
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
        else:
            # From the first token on: the prompt is no part of it.
            began_s, num_tokens = time.perf_counter(), 1
    return num_tokens / (time.perf_counter() - began_s)


def _print_steps(engine: LLMEngine) -> None:
    """Print the median step of 64 sequences, of which none, half or all have a grammar."""
    for temperature in (0.0, 1.0):
        for num_forced in (0, output.MAX_FORCED_TOKENS):
            _print_steps_of(engine, temperature, num_forced)


def _print_steps_of(engine: LLMEngine, temperature: float, num_forced: int) -> None:
    runs: dict[int, list[Steps]] = {0: [], NUM_ROWS // 2: [], NUM_ROWS: []}
    most, output.MAX_FORCED_TOKENS = output.MAX_FORCED_TOKENS, num_forced
    for number in range(ROUNDS):
        for num_constrained, found in runs.items():
            found.append(_steps(engine, num_constrained, temperature, number))
    output.MAX_FORCED_TOKENS = most
    for num_constrained, found in runs.items():
        pairs = list(zip(found, runs[0], strict=True))
        cost = median(one.step_s / plain.step_s for one, plain in pairs)
        speed = median(one.tokens_per_s / plain.tokens_per_s for one, plain in pairs)
        step_s, tokens_per_s = (median(values) for values in zip(*found, strict=True))
        print(
            f"temperature {temperature:g}, {'forced tokens added' if num_forced else 'each token drawn'}, "
            f"{num_constrained:2} of {NUM_ROWS} rows with a grammar: {1e3 * step_s:.1f} ms a step "
            f"({100 * (cost - 1):+.1f} %), {tokens_per_s:.0f} tokens/s ({speed:.2f})"
        )


class Steps(NamedTuple):
    """Some steps in which all sequences decode."""

    step_s: float
    """Median time of one."""

    tokens_per_s: float


def _steps(engine: LLMEngine, num_constrained: int, temperature: float, seed: int) -> Steps:
    """Measure steps in which all sequences decode."""
    random = Random(seed)
    requests = [
        Request(
            id=f"{num_constrained}-{temperature}-{seed}-{number}",
            prompt_token_ids=tuple(random.randrange(300, 1000) for _ in range(8)),
            sampling=Sampling(
                temperature=temperature, seed=number, max_tokens=100, ignore_eos=number >= num_constrained
            ),
            grammar=LISTS if number < num_constrained else None,
        )
        for number in range(NUM_ROWS)
    ]
    engine.add(requests)
    while engine.stats.num_running < NUM_ROWS and not engine.is_idle:
        engine.advance()
    taken: list[float] = []
    num_tokens = 0
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        deltas = engine.advance()
        if engine.stats.num_running == NUM_ROWS:
            taken.append(time.perf_counter() - began_s)
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
    engine.drop([request.id for request in requests])
    return Steps(median(taken), num_tokens / sum(taken))


if __name__ == "__main__":
    main()
