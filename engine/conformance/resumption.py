"""The resume matrix: requests are stopped after each of their first tokens, and continued with these as progress.

A cell is `bitwise` if tokens, end and log-probabilities are those of the undisturbed request, `same tokens` if only its
log-probabilities differ or cannot be requested, and `refused` if the engine rejects the request.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from sluice.engine.conformance.subject import Driver, Output, Violation
from sluice.engine.request import ChoiceProgress, Grammar

NUM_TOKENS = 30
SEEDED = MappingProxyType({"temperature": 1.2, "seed": 11})

COLOURS = Grammar(
    kind="json_schema",
    text='{"type": "array", "minItems": 64, "items": {"enum": ["red", "green", "blue", "black", "brown"]}}',
)
"""Long enough for `NUM_TOKENS`, with tokens that follow from those before, and others."""

CALLS = Grammar.composed(
    [
        (
            "start",
            "lark",
            'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: "{\\"name\\": \\"paint\\", " @paint "}"',
        ),
        ("paint", "json_schema", COLOURS.text),
    ]
)
"""A call with text around its arguments, as the answers of models have them."""

ROWS: Mapping[str, Mapping[str, Any]] = {  # Any: options of `Driver.request`
    "greedy": {},
    "seeded": SEEDED,
    "filters": {**SEEDED, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "three choices": {**SEEDED, "num_choices": 3},
    "penalties": {**SEEDED, "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "bias and minimum": {**SEEDED, "logit_bias": {5: 3.0}, "min_tokens": 20},
    "grammar": {**SEEDED, "grammar": COLOURS},
    "a call's grammar": {**SEEDED, "grammar": CALLS},
    "stop strings": {**SEEDED, "stop": ("\0",)},
    "stop tokens": {**SEEDED, "stop_token_ids": ()},
    "a prompt that is read": {**SEEDED, "prompt_logprobs": 2},
}
"""Options by the name of their row. Stops are in the output that they end."""


class Resume(StrEnum):
    """How exactly a request continues."""

    BITWISE = "bitwise"
    SAME_TOKENS = "same tokens"
    REFUSED = "refused"


def resume_matrix(driver: Driver) -> dict[str, list[Resume]]:
    """Return for each row how exactly its request continues after 1, 2, … tokens; one more if there is an adapter.

    Raises:
        Violation: a continued request has other tokens, or another end.
    """
    adapter = driver.subject.adapter
    rows = {**ROWS, "adapter": {**SEEDED, "adapter": adapter}} if adapter else ROWS
    return {name: _row(driver, name, options) for name, options in rows.items()}


def _row(driver: Driver, name: str, options: Mapping[str, Any]) -> list[Resume]:
    refused = driver.subject.refused_options
    if not refused.isdisjoint(options):
        return [Resume.REFUSED] * NUM_TOKENS
    has_logprobs = "logprobs" not in refused
    options = {**options, "max_tokens": NUM_TOKENS + 2, **({"logprobs": 2} if has_logprobs else {})}
    prompt = driver.prompt()
    whole = driver.run(driver.request(prompt, **options))
    stops = {"stop": (whole[0].text[-3:],), "stop_token_ids": tuple(whole[0].token_ids[-2:-1])}
    if stopped := {option: stop for option, stop in stops.items() if option in options}:
        options |= stopped
        whole = driver.run(driver.request(prompt, **options))
    if min(len(output.token_ids) for output in whole) < 2:
        raise Violation(f"{name}: an output of one token, which cannot be continued")
    counts = range(1, min(NUM_TOKENS, min(len(output.token_ids) for output in whole) - 1) + 1)
    continued = [driver.request(prompt, progress=_progress(whole, count), **options) for count in counts]
    driver.add(*continued)  # together, so that each has neighbours
    return [
        _cell(f"{name}, after {count} tokens", whole, driver.finish(request), has_logprobs=has_logprobs)
        for count, request in zip(counts, continued, strict=True)
    ]


def _progress(whole: Sequence[Output], count: int) -> tuple[ChoiceProgress, ...]:
    # The second choice is a token behind, and a third one has none: no two are equally far.
    lengths = (count, count - 1, 0)
    return tuple(
        ChoiceProgress(token_ids=tuple(output.token_ids[:length]))
        for output, length in zip(whole, lengths, strict=False)
    )


def _cell(name: str, whole: Sequence[Output], rest: Sequence[Output], *, has_logprobs: bool) -> Resume:
    is_bitwise = has_logprobs
    for output, other in zip(whole, rest, strict=True):
        begin = other.num_resumed
        if other.token_ids != output.token_ids[begin:] or other.finish != output.finish:
            raise Violation(
                f"{name}: tokens {other.token_ids} with the end {other.finish} follow the first {begin}; undisturbed"
                f" {output.token_ids[begin:]} with {output.finish}"
            )
        is_bitwise &= other.logprobs == output.logprobs[begin:]
    return Resume.BITWISE if is_bitwise else Resume.SAME_TOKENS
