"""Defaults of a model for sampling, and what a job is sampled with. Pure functions.

As in vLLM, the fields of generation_config.json that `FIELDS` names are the defaults of options that a request does not
state, whatever `do_sample` says.
"""

from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from sluice.engine.errors import ModelFolderError
from sluice.protocol.checks import is_token_id
from sluice.protocol.errors import InvalidJob
from sluice.protocol.limits import MAX_TOKENS
from sluice.protocol.sampling import NEUTRAL, JobOptions, ResolvedOptions

FIELDS: Mapping[str, str] = {name: "max_new_tokens" if name == "max_tokens" else name for name in NEUTRAL}
"""By option: the field of generation_config.json."""

NOTHING_STATED = JobOptions()


def read_defaults(generation_config: Mapping[str, object]) -> JobOptions:
    """Return the options that a generation config states.

    Raises:
        ModelFolderError: a value is out of its range.
    """
    stated = {
        option: _in_our_terms(option, value)
        for option, field in FIELDS.items()
        if (value := generation_config.get(field)) is not None
    }
    if stated.get("max_tokens") == 0:
        raise _not_valid("max_tokens must be 1 or more, got 0")
    try:
        return JobOptions(**stated)  # pyright: ignore[reportArgumentType]  # JobOptions checks the types
    except InvalidJob as error:
        raise _not_valid(str(error)) from error


def _not_valid(why: str) -> ModelFolderError:
    return ModelFolderError(
        f"generation_config.json has a default that is not valid in a request: {why}. "
        f"Correct it, or ignore its defaults with --generation-config none."
    )


def _in_our_terms(option: str, value: object) -> object:
    """Return a value as a request would state it: other programs take whole floats, `top_k` -1 and any length."""
    if option not in ("max_tokens", "top_k"):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if option == "top_k":
        return 0 if value == -1 else value
    return min(value, MAX_TOKENS) if isinstance(value, int) else value


def resolve(
    stated: JobOptions, defaults: JobOptions, end_token_ids: frozenset[int], *, room: int = MAX_TOKENS
) -> ResolvedOptions:
    """Return a job's options: those of its request, else the model's defaults, else `NEUTRAL`.

    Args:
        stated: Options of the request.
        defaults: Those of the model.
        end_token_ids: Those of the model.
        room: Tokens that fit after the prompt. A length that the request does not state is at most this.
    """
    options = zip(NEUTRAL.items(), _neutral_of(stated), _neutral_of(defaults), strict=True)
    values: dict[str, Any] = {  # Any: numbers of both types
        name: own if own is not None else neutral if default is None else default
        for (name, neutral), own, default in options
    }
    values["max_tokens"] = _max_tokens(stated, defaults, room)
    return ResolvedOptions(**values, end_token_ids=_valid(end_token_ids))


_neutral_of = attrgetter(*NEUTRAL)


@lru_cache(maxsize=64)
def _valid(end_token_ids: frozenset[int]) -> tuple[int, ...]:
    # Some configs have -1 for no end token.
    return tuple(sorted(filter(is_token_id, end_token_ids)))


def _max_tokens(stated: JobOptions, defaults: JobOptions, room: int) -> int:
    if stated.makes_vector:
        return 0
    # Not cut to the model's default or to what fits: the worker refuses what exceeds the context.
    if stated.max_tokens is not None:
        return stated.max_tokens
    return max(1, min(stated.planned_tokens if defaults.max_tokens is None else defaults.max_tokens, room))


def describe(defaults: JobOptions) -> str:
    """Return the stated defaults for people: `temperature 0.7, top_k 20`."""
    stated = {name: value for name in NEUTRAL if (value := getattr(defaults, name)) is not None}
    return ", ".join(f"{name} {value:g}" for name, value in stated.items())
