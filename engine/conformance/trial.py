"""A trial of a loaded engine: does each option do what it says, also after a resume? It takes a second or two.

Its requests are made so that rounding cannot decide: a temperature that leaves nothing but the noise, and biases that
leave two candidates.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sluice.engine.capabilities import GRAMMAR, NUM_CHOICES
from sluice.engine.conformance.subject import Driver, Output, Subject, TimedOut, Violation, expect
from sluice.engine.request import ChoiceProgress, Grammar, Request

_ALL_NOISE = 10_000.0
"""A temperature at which differences of logits do not count."""

_FIRST, _SECOND = 17, 19
"""Two tokens."""

_PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""With the values that change nothing."""


def failed_options(subject: Subject) -> dict[str, str]:
    """Try an idle engine; return the options that do not work, each with the reason.

    Raises:
        Violation: it does not draw by the seed, or resumes with other noise: no job that is not greedy could be run.
        TimedOut: a request did not end in time.
    """
    driver = Driver(subject)
    if (problem := _tried(driver, _seeds)) is not None:
        raise Violation(f"its tokens are not those of the seed: {problem}")
    found = {options: _tried(driver, trial) for options, trial in _TRIALS.items()}
    driver.settle()
    return {name: why for options, why in found.items() if why is not None for name in options}


def _tried(driver: Driver, trial: Callable[[Driver], None]) -> str | None:
    """Return what a trial finds wrong.

    Raises:
        TimedOut: a request did not end in time.
    """
    try:
        trial(driver)
    except TimedOut:
        raise
    except Violation as violation:
        driver.engine.drop([request_id for request_id, _ in driver.outputs])
        return str(violation)
    return None


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
    is_last = whole.token_ids[-1:] == [_FIRST] and len(whole.token_ids) == 7
    expect(is_last, "an output does not end after min_tokens, by a token with a bias of 100")
    _check_resume(driver, [whole], prompt, options, (4,))


def _penalty(name: str) -> Callable[[Driver], None]:
    def trial(driver: Driver) -> None:
        prompt = driver.prompt()
        of_first, of_second = (_logprob_after(driver, prompt, token) for token in (_FIRST, _SECOND))
        # The token that the output has leads by one, and the penalty takes more.
        bias = {_FIRST: 50.0, _SECOND: max(-100.0, min(100.0, 49.0 + of_first - of_second))}
        plain, penalised = (
            driver.run(_second_token(driver, prompt, logit_bias=bias, **{name: penalty}))[0].token_ids
            for penalty in (_PENALTIES[name], 2.0)
        )
        expect(plain == [_FIRST], "a bias does not decide")
        expect(penalised == [_SECOND], "a penalised token was drawn again")

    return trial


def _logprob_after(driver: Driver, prompt: tuple[int, ...], token_id: int) -> float:
    """Return the log-probability of a token after the prompt and `_FIRST`."""
    [output] = driver.run(_second_token(driver, prompt, logit_bias={token_id: 100.0}, logprobs=1))
    expect(output.token_ids == [token_id] and len(output.logprobs) == 1, "a bias of 100 does not decide")
    return output.logprobs[0].chosen


def _second_token(driver: Driver, prompt: tuple[int, ...], **options: Any) -> Request:  # noqa: ANN401
    # Any: options of several types.
    return driver.request(prompt, progress=(ChoiceProgress(token_ids=(_FIRST,)),), max_tokens=2, **options)


def _filter(name: str, value: float) -> Callable[[Driver], None]:
    def trial(driver: Driver) -> None:
        options: dict[str, Any] = {"logit_bias": {_FIRST: 100.0}, "temperature": _ALL_NOISE, "seed": 5, name: value}
        [output] = driver.run(driver.request(**options))
        expect(set(output.token_ids) == {_FIRST}, "a token was drawn that the filter leaves out")

    return trial


def _logprobs(driver: Driver) -> None:
    [output] = driver.run(driver.request(logprobs=2, max_tokens=3))
    expect(len(output.logprobs) == len(output.token_ids), "a token has no log-probability")
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        expect(len(found.top) == 2, "a token has not the log-probabilities that were asked for")
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
    prompt, options = driver.prompt(), {"grammar": Grammar(kind="choice", text='["blue"]')}
    [whole] = driver.run(driver.request(prompt, **options))
    expect(whole.text == "blue", "an output does not match its grammar")
    _check_resume(driver, [whole], prompt, options, (1,))


_TRIALS: Mapping[tuple[str, ...], Callable[[Driver], None]] = {
    (NUM_CHOICES,): _choices,
    (GRAMMAR,): _grammars,
    ("logit_bias", "min_tokens"): _biases,
    **{(name,): _penalty(name) for name in _PENALTIES},
    ("top_k",): _filter("top_k", 1),
    ("top_p",): _filter("top_p", 1e-6),
    ("min_p",): _filter("min_p", 1.0),
    ("logprobs",): _logprobs,
}
