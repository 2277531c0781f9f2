"""A trial of a loaded vLLM: does each option do what it says, also after a resume? What cannot be shown is refused.

Its requests are made so that rounding cannot decide: a temperature that leaves nothing but the noise, and biases that
leave two candidates.
"""

from collections.abc import Callable, Mapping

from sluice.engine.capabilities import GRAMMAR, NUM_CHOICES
from sluice.engine.conformance.subject import Driver, Output, Subject, Violation, expect
from sluice.engine.interface import Engine
from sluice.engine.request import ChoiceProgress, Grammar
from sluice.worker.engines.vllm.orders import CoreFacts

_ALL_NOISE = 10_000.0
"""A temperature at which differences of logits do not count."""

_FIRST, _SECOND = 17, 19
"""Two tokens."""


def refused_after_trial(engine: Engine, facts: CoreFacts, eos_token_ids: frozenset[int]) -> dict[str, str]:
    """Try an idle engine; return the options that do not work, each with the reason."""
    driver = Driver(Subject(engine=engine, vocab_size=facts.vocab_size, eos_token_ids=eos_token_ids))
    refused: dict[str, str] = {}
    for options, trial in _TRIALS.items():
        try:
            trial(driver)
        except Violation as violation:
            refused |= dict.fromkeys(options, f"a trial at start failed with vLLM {facts.version}: {violation}")
            driver.engine.drop([request_id for request_id, _ in driver.outputs])
    driver.settle()
    return refused


def _seeds(driver: Driver) -> None:
    prompt = driver.prompt()
    options = {"temperature": _ALL_NOISE, "seed": 5, "max_tokens": 12}
    [whole] = driver.run(driver.request(prompt, **options))
    [other] = driver.run(driver.request(prompt, **{**options, "seed": 6}))
    expect(other.token_ids != whole.token_ids, "two seeds gave the same tokens")
    _check_resume(driver, [whole], prompt, options, (4,))


def _choices(driver: Driver) -> None:
    prompt = driver.prompt()
    options = {"temperature": _ALL_NOISE, "seed": 5, "max_tokens": 12, "num_choices": 3}
    whole = driver.run(driver.request(prompt, **options))
    expect(len({tuple(output.token_ids) for output in whole}) == len(whole), "choices have the same tokens")
    _check_resume(driver, whole, prompt, options, (4, 3, 0))


def _biases(driver: Driver) -> None:
    prompt = driver.prompt()
    options = {"logit_bias": {_FIRST: 100.0}, "stop_token_ids": (_FIRST,), "min_tokens": 6}
    [whole] = driver.run(driver.request(prompt, **options))
    expect(whole.token_ids.index(_FIRST) == 6, "an output does not end after min_tokens, by a token with a bias of 100")
    _check_resume(driver, [whole], prompt, options, (4,))


def _penalties(driver: Driver) -> None:
    prompt = (_FIRST + 1, *driver.prompt(3))
    options = {"logit_bias": {_FIRST: 100.0, _SECOND: 100.0}, "max_tokens": 2}
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    [plain] = driver.run(driver.request(prompt, **options))
    [whole] = driver.run(driver.request(prompt, **options, **penalties))
    expect(len(set(plain.token_ids)) == 1, "a bias of 100 does not decide")
    expect(len(set(whole.token_ids)) == 2, "a penalised token was drawn again")
    _check_resume(driver, [whole], prompt, {**options, **penalties}, (1,))


def _logprobs(driver: Driver) -> None:
    [output] = driver.run(driver.request(logprobs=2, max_tokens=3))
    expect(len(output.logprobs) == len(output.token_ids), "a token has no log-probability")
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        expect(found.top[0] == (token_id, found.chosen), "a greedy token is not the likeliest one")
        expect(found.top[1][1] <= found.chosen <= 0, "log-probabilities are out of order")


def _check_resume(
    driver: Driver, whole: list[Output], prompt: tuple[int, ...], options: Mapping[str, object], counts: tuple[int, ...]
) -> None:
    """Check that a request continues after its first tokens, of each choice so many, as it did before."""
    pairs = list(zip(whole, counts, strict=True))
    progress = tuple(ChoiceProgress(token_ids=tuple(output.token_ids[:count])) for output, count in pairs)
    rest = driver.run(driver.request(prompt, progress=progress, **options))
    expect(
        [output.token_ids for output in rest] == [output.token_ids[count:] for output, count in pairs],
        "a resumed request has other tokens",
    )


def _grammars(driver: Driver) -> None:
    [output] = driver.run(driver.request(grammar=Grammar(kind="choice", text='["blue"]')))
    expect(output.text == "blue", "an output does not match its grammar")


_TRIALS: Mapping[tuple[str, ...], Callable[[Driver], None]] = {
    ("temperature",): _seeds,
    (NUM_CHOICES,): _choices,
    (GRAMMAR,): _grammars,
    ("logit_bias", "min_tokens"): _biases,
    ("repetition_penalty", "frequency_penalty", "presence_penalty"): _penalties,
    ("logprobs",): _logprobs,
}
