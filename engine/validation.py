"""Check that a request can ever run. Depends only on the model's limits, so any thread may call it."""

from collections.abc import Collection

from sluice.engine.errors import (
    InvalidGrammar,
    OptionRefused,
    PromptEmpty,
    PromptTooLong,
    RequestRejected,
    RequestTooLarge,
    UnknownAdapter,
    UnknownToken,
)
from sluice.engine.executor import ModelLimits
from sluice.engine.request import GRAMMAR_KINDS, Grammar, GrammarKind, Request
from sluice.engine.sampling import MAX_GRAMMAR_CHARS

MAX_GRAMMAR_RULES = 1000
"""Of a Lark grammar: colons, of which each rule has one. A chain of 4,000 terminals took over a minute to compile."""


def check_request(request: Request, limits: ModelLimits, *, step_tokens: int = 0) -> None:
    """Check that `request` can run under `limits` when it has the engine to itself.

    Args:
        request: to be checked.
        limits: of the model and its cache.
        step_tokens: maximum tokens of a step; matters in a model with window groups.

    Raises:
        RequestRejected: it cannot; the message gives the numbers.
    """
    _check_choices(request)
    _check_tokens(request, limits)
    _check_length(request, limits, step_tokens)
    _check_reads(request, limits)
    if request.adapter and request.adapter not in limits.adapters:
        known = ", ".join(sorted(limits.adapters)) or "none"
        raise UnknownAdapter(f"this engine has no adapter {request.adapter!r}; it has {known}")
    if request.grammar is not None:
        _check_grammar(request.grammar, ignores_end=request.sampling.ignore_eos)


def _check_choices(request: Request) -> None:
    if request.num_choices < 1:
        raise RequestRejected(f"a request needs 1 choice or more, got {request.num_choices}")
    if request.progress and len(request.progress) != request.num_choices:
        raise RequestRejected(
            f"a resumed request needs the progress of each of its {request.num_choices} choices, "
            f"got {len(request.progress)}"
        )


def _check_tokens(request: Request, limits: ModelLimits) -> None:
    _check_known("the prompt", request.prompt_token_ids, limits)
    for progress in request.progress:
        _check_known("the output so far", progress.token_ids, limits)
    _check_known("stop_token_ids", request.sampling.stop_token_ids, limits)
    _check_known("logit_bias", request.sampling.logit_bias, limits)


def _check_known(where: str, token_ids: Collection[int], limits: ModelLimits) -> None:
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= limits.vocab_size:
        raise UnknownToken(
            f"{where} has the token id {low if low < 0 else high}; this model knows 0 to {limits.vocab_size - 1}"
        )


def _check_length(request: Request, limits: ModelLimits, step_tokens: int) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise PromptEmpty("the prompt has no tokens")
    if request.sampling.max_tokens == 0:
        if num_prompt_tokens > limits.max_model_len:
            raise PromptTooLong(
                f"prompt is {num_prompt_tokens} tokens; this model reads {limits.max_model_len}. "
                f"Shorten it or use a model with a longer context."
            )
    elif num_prompt_tokens >= limits.max_model_len:
        raise PromptTooLong(
            f"prompt is {num_prompt_tokens} tokens; this model reads {limits.max_model_len - 1} and needs 1 to answer. "
            f"Shorten the prompt or use a model with a longer context."
        )
    _check_stated_length(request, limits)
    num_kept = limits.most_cached_tokens(num_prompt_tokens, request.sampling.max_tokens)
    if limits.blocks_of(num_kept, step_tokens) > limits.num_blocks:
        most = limits.most_tokens(num_prompt_tokens, request.sampling.max_tokens)
        num_slots = limits.longest_sequence(limits.num_blocks, step_tokens)
        raise RequestTooLarge(
            f"prompt and output can become {most} tokens; this worker's KV cache holds {num_slots}. "
            f"Shorten the prompt or lower max_tokens."
        )


def _check_stated_length(request: Request, limits: ModelLimits) -> None:
    # A request that was begun elsewhere, with a longer context, is continued as far as it goes here.
    if request.progress:
        return
    num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt_tokens + max_tokens > limits.max_model_len:
        raise RequestTooLarge(
            f"prompt ({num_prompt_tokens} tokens) and max_tokens ({max_tokens}) are {num_prompt_tokens + max_tokens} "
            f"tokens; this model's context is {limits.max_model_len}. "
            f"Shorten the prompt, or lower or leave out max_tokens."
        )


def _check_reads(request: Request, limits: ModelLimits) -> None:
    """Check that a request generates something or reads its prompt, and that a vector can be as it should."""
    embed, max_tokens = request.embed, request.sampling.max_tokens
    if embed is None:
        if max_tokens == 0 and request.sampling.prompt_logprobs is None:
            raise RequestRejected("max_tokens is 0 and nothing is read of the prompt: there is nothing to compute")
        if max_tokens == 0 and request.num_choices != 1:
            raise RequestRejected(
                f"max_tokens is 0: the prompt is read once, but {request.num_choices} choices are asked"
            )
        return
    if max_tokens != 0 or request.num_choices != 1 or request.grammar is not None:
        raise RequestRejected("a prompt that is embedded generates nothing: neither tokens nor choices nor a grammar")
    if embed.is_classified and limits.num_classes == 0:
        raise OptionRefused("this model has no classification head")
    if limits.hidden_size == 0:
        raise OptionRefused("this engine has no vectors of prompts")
    if embed.dimensions is not None and embed.dimensions > limits.hidden_size:
        raise RequestRejected(f"dimensions is {embed.dimensions}; this model's vectors have {limits.hidden_size}")


def _check_grammar(grammar: Grammar, *, ignores_end: bool) -> None:
    """Check what need not be compiled to be known."""
    if grammar.kind not in GRAMMAR_KINDS:
        raise InvalidGrammar(f"a grammar is one of {', '.join(GRAMMAR_KINDS)}, got {grammar.kind!r}")
    for _, kind, text in grammar.parts:
        _check_part(kind, text)
    if ignores_end:
        raise InvalidGrammar("ignore_eos contradicts a grammar, after whose end only the end of the output may follow")


def _check_part(kind: GrammarKind, text: str) -> None:
    """Check one grammar. What is composed of several is longer than they are: it is JSON that has theirs as texts."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidGrammar(f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are read")
    if kind == "lark" and (num_rules := text.count(":")) > MAX_GRAMMAR_RULES:
        raise InvalidGrammar(f"the grammar has {num_rules} colons; at most {MAX_GRAMMAR_RULES} are compiled")
