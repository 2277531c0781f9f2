"""Checks of the interface. Each drives an engine that is idle before, and must be idle after."""

import re
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice.engine.conformance.subject import Driver, LeftOut, Output, Violation, expect
from sluice.engine.errors import RequestRejected
from sluice.engine.request import ChoiceProgress, Embed, FinishReason, Grammar, Request

Run = Callable[[Driver], None]

_NEAR = 0.05
"""What rounding may change in a vector of length 1 or a log-probability where bits depend on the batch."""

_NUM_TEXTS = 20
"""Outputs in which a check looks for what it needs."""

MOMENTS = range(6)
"""Steps after which requests are interrupted."""


@dataclass(frozen=True, slots=True)
class Check:
    """A behaviour that is checked."""

    sentence: str
    needs: tuple[str, ...]
    """Options that it uses: an engine that refuses one is not checked."""

    run: Run

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.run.__name__


CHECKS: dict[str, Check] = {}


def check(sentence: str, *needs: str) -> Callable[[Run], Run]:
    """Register a check under the name of its function."""

    def register(run: Run) -> Run:
        CHECKS[run.__name__] = Check(sentence, needs, run)
        return run

    return register


# ---------------------------------------------------------------- output


@check("a request yields max_tokens tokens and ends with the reason length")
def max_tokens(driver: Driver) -> None:
    for num_tokens in (1, 2, 17):
        [output] = driver.run(driver.request(max_tokens=num_tokens))
        expect(len(output.token_ids) == num_tokens, f"{len(output.token_ids)} tokens of {num_tokens}")
        _ended(output, FinishReason.LENGTH)


@check("the same request has the same tokens, text and end each time")
def repeated(driver: Driver) -> None:
    prompt = driver.prompt()
    first, second = (driver.run(driver.request(prompt))[0] for _ in range(2))
    _equal(first, second, "when repeated")


@check("tokens do not depend on the other requests of a batch")
def neighbours(driver: Driver) -> None:
    requests = [driver.request(driver.prompt(4 + 3 * number), max_tokens=8 + number) for number in range(12)]
    alone = [
        driver.run(driver.request(request.prompt_token_ids, max_tokens=request.sampling.max_tokens))[0]
        for request in requests
    ]
    for one, other in zip(alone, driver.run(*requests), strict=True):
        _equal(one, other, "in a batch")


@check("an adapter changes tokens, and only those of its requests, whatever runs beside", "adapter")
def adapters(driver: Driver) -> None:
    if not driver.subject.adapter:
        raise LeftOut
    prompts = [driver.prompt(4 + 3 * number) for number in range(3)]
    names = ("", driver.subject.adapter)
    requests = [driver.request(prompt, adapter=name) for prompt in prompts for name in names]
    alone = [driver.run(driver.request(one.prompt_token_ids, adapter=one.adapter))[0] for one in requests]
    pairs = zip(alone[::2], alone[1::2], strict=True)
    expect(any(one.token_ids != other.token_ids for one, other in pairs), "an adapter changes nothing")
    for one, other in zip(alone, driver.run(*requests), strict=True):
        _equal(one, other, "beside others")


@check("a request that is added between steps joins the batch, with the tokens that it has alone")
def added_between_steps(driver: Driver) -> None:
    prompts = [driver.prompt() for _ in range(4)]
    alone = [driver.run(driver.request(prompt))[0] for prompt in prompts]
    requests = [driver.request(prompt) for prompt in prompts]
    for request in requests:
        driver.add(request)
        driver.advance_times(2)
    for one, other in zip(alone, driver.finish(*requests), strict=True):
        _equal(one, other, "when it joins later")


@check("a request added while another runs returns tokens before that one has ended")
def joins_before_the_end(driver: Driver) -> None:
    long, short = driver.request(max_tokens=64), driver.request(max_tokens=2)
    driver.add(long)
    driver.advance_times(2)
    driver.add(short)
    driver.finish(short)
    expect(driver.outputs[long.id, 0].finish is None, "the short request waited for the end of the long one")
    driver.finish(long)


@check("more requests than places all end: none starves")
def more_than_places(driver: Driver) -> None:
    num_requests = 2 * driver.engine.stats.num_places + 3
    for output in driver.run(*[driver.request(max_tokens=3) for _ in range(num_requests)]):
        _ended(output, FinishReason.LENGTH)


@check("more tokens than the cache holds at once are computed all the same")
def more_than_the_cache(driver: Driver) -> None:
    stats = driver.engine.stats
    num_tokens = min(driver.engine.max_request_tokens, stats.kv_tokens_total // 2) // 2
    num_requests = min(24, 2 * stats.kv_tokens_total // max(1, num_tokens))
    requests = [driver.request(driver.prompt(num_tokens), max_tokens=4) for _ in range(num_requests)]
    for output in driver.run(*requests):
        _ended(output, FinishReason.LENGTH)


@check("prompts with the same beginning have the tokens of a first prompt")
def shared_beginnings(driver: Driver) -> None:
    beginning = driver.prompt(40)
    prompts = [beginning + driver.prompt(length) for length in (1, 5, 17)]
    first = [driver.run(driver.request(prompt))[0] for prompt in prompts]
    for one, other in zip(first, driver.run(*map(driver.request, prompts)), strict=True):
        _equal(one, other, "with a cached beginning")


@check("a resumed request returns the tokens after its progress, and no token twice")
def resumed(driver: Driver) -> None:
    prompt = driver.prompt()
    [whole] = driver.run(driver.request(prompt))
    for count in (1, 7, 15):
        before = ChoiceProgress(token_ids=tuple(whole.token_ids[:count]))
        [rest] = driver.run(driver.request(prompt, progress=(before,)))
        expect(rest.token_ids == whole.token_ids[count:], f"{rest.token_ids} after the first {count}")
        expect(rest.finish == whole.finish, f"ended with {rest.finish} after the first {count}")


@check("a choice that had ended before its request was resumed returns nothing", "num_choices")
def ended_choices(driver: Driver) -> None:
    done, rest = ChoiceProgress(token_ids=driver.prompt(3), is_finished=True), ChoiceProgress()
    request = driver.request(num_choices=2, progress=(done, rest))
    driver.add(request)
    driver.advance_until(lambda: driver.outputs[request.id, 1].finish is not None, "the other choice has ended")
    driver.settle()
    expect(driver.outputs[request.id, 0].finish is None, "a delta of the choice that had ended")


# ---------------------------------------------------------------- rejections and limits


@check("validate rejects an empty prompt, an unknown token and a prompt that is too long")
def rejections(driver: Driver) -> None:
    engine = driver.engine
    for prompt in ((), (driver.subject.vocab_size,), driver.prompt(engine.max_request_tokens + 1)):
        _rejected(driver, driver.request(prompt))
    engine.validate(driver.request())


@check("a rejected request ends with an error, and its batch mates are untouched")
def rejected_in_a_batch(driver: Driver) -> None:
    prompt = driver.prompt()
    [alone] = driver.run(driver.request(prompt))
    bad, good, last = driver.request(()), driver.request(prompt), driver.request((driver.subject.vocab_size,))
    first, second, third = driver.run(bad, good, last)
    for output in (first, third):
        _ended(output, FinishReason.ERROR)
        expect(output.finish is not None and output.finish.is_rejection, "the error is not marked as a rejection")
        expect(bool(output.finish and output.finish.error), "the error has no sentence")
    _equal(alone, second, "beside rejected requests")


@check("the longest request runs to its end, and one token more is rejected")
def longest_request(driver: Driver) -> None:
    most = driver.engine.max_request_tokens
    prompt = driver.prompt(most - 3)
    [output] = driver.run(driver.request(prompt, max_tokens=3))
    _ended(output, FinishReason.LENGTH)
    expect(len(output.token_ids) == 3, f"{len(output.token_ids)} tokens of 3")
    _rejected(driver, driver.request(prompt + driver.prompt(1), max_tokens=3))


@check("any thread may validate while steps are computed")
def validate_on_a_thread(driver: Driver) -> None:
    errors: list[Exception] = []
    good, bad = driver.request(), driver.request(())

    def validate() -> None:
        try:
            for _ in range(200):
                driver.engine.validate(good)
                _rejected(driver, bad)
        except Exception as error:  # noqa: BLE001  # whatever it is, the check reports it
            errors.append(error)

    thread = threading.Thread(target=validate)
    thread.start()
    driver.run(*[driver.request() for _ in range(4)])
    thread.join()
    expect(not errors, f"validate raised {errors[:1]}")


# ---------------------------------------------------------------- grammars


@check("an output with a grammar matches it, at any temperature and beside others", "grammar")
def conforming(driver: Driver) -> None:
    prompt = driver.prompt()
    [alone] = driver.run(driver.request(prompt))
    expected = {
        "[a-c]{3,9}x": Grammar(kind="regex", text="[a-c]{3,9}x"),
        "red|green|dark green": Grammar(kind="choice", text='["red", "green", "dark green"]'),
        "yes|no!*": Grammar(kind="lark", text='start: "yes" | "no" "!"*'),
        r'\{\s*"n"\s*:\s*-?[0-9]\s*\}': Grammar(
            kind="json_schema",
            text='{"type": "object", "properties": {"n": {"type": "integer", "minimum": -9, "maximum": 9}},'
            ' "required": ["n"], "additionalProperties": false}',
        ),
    }
    requests = [
        driver.request(max_tokens=64, temperature=temperature, seed=seed, grammar=grammar)
        for grammar in expected.values()
        for seed, temperature in enumerate((0.0, 1.0, 5.0))
    ]
    *outputs, beside = driver.run(*requests, driver.request(prompt))
    for number, output in enumerate(outputs):
        pattern = list(expected)[number // 3]
        is_whole = output.finish is not None and output.finish.reason is FinishReason.STOP
        expect(not is_whole or re.fullmatch(pattern, output.text) is not None, f"{output.text!r} is not {pattern}")
        expect(is_whole or "*" in pattern, f"{output.text!r} ended with {output.finish}, not with {pattern}")
    _equal(alone, beside, "beside requests with grammars")


@check("a grammar that cannot be compiled fails its request alone, with a sentence", "grammar")
def failing_grammars(driver: Driver) -> None:
    prompt = driver.prompt()
    [alone] = driver.run(driver.request(prompt))
    bad = [
        driver.request(grammar=grammar)
        for grammar in (
            Grammar(kind="regex", text="(a"),
            Grammar(kind="json_schema", text="{"),
            Grammar(kind="json_schema", text='{"type": "nothing"}'),
            Grammar(kind="lark", text="start: unknown"),
        )
    ]
    *failed, beside = driver.run(*bad, driver.request(prompt))
    for output in failed:
        _ended(output, FinishReason.ERROR)
        expect(output.finish is not None and output.finish.is_rejection, "the failure is not marked as a rejection")
        expect(bool(output.finish and output.finish.error), "the error has no sentence")
    _equal(alone, beside, "beside grammars that cannot be compiled")


@check("a grammar that leaves no token that may follow fails its request alone", "grammar", "min_tokens")
def empty_masks(driver: Driver) -> None:
    prompt = driver.prompt()
    [alone] = driver.run(driver.request(prompt))
    stuck = driver.request(grammar=Grammar(kind="choice", text='["red"]'), min_tokens=9)
    failed, beside = driver.run(stuck, driver.request(prompt))
    _ended(failed, FinishReason.ERROR)
    expect(failed.finish is not None and "min_tokens" in (failed.finish.error or ""), f"{failed.finish}")
    _equal(alone, beside, "beside a grammar without a token")


@check("a request may be aborted or dropped while its grammar is compiled", "grammar")
def leaving_while_compiled(driver: Driver) -> None:
    for moment in MOMENTS:
        # A grammar that no other request has.
        aborted, dropped = (
            driver.request(max_tokens=40, grammar=Grammar(kind="regex", text=f"{name}{moment}[a-z]{{40}}"))
            for name in ("aborted", "dropped")
        )
        driver.add(aborted, dropped)
        driver.advance_times(moment)
        driver.engine.abort([aborted.id])
        driver.drop([dropped])
        _ended(driver.finish(aborted)[0], FinishReason.ABORTED)
        driver.settle()


# ---------------------------------------------------------------- ids, abort and drop


@check("the id of a dropped request may be used again at every moment")
def ids_of_dropped_requests(driver: Driver) -> None:
    prompts = [driver.prompt(), driver.prompt()]
    [alone] = driver.run(driver.request(prompts[1], max_tokens=8))
    for moment in MOMENTS:
        older = driver.request(prompts[0], max_tokens=40)
        driver.add(older)
        driver.advance_times(moment)
        driver.drop([older])
        driver.settle()  # what was on its way from another process has come
        _equal(alone, driver.run(driver.request(prompts[1], id=older.id, max_tokens=8))[0], f"after {moment} steps")


@check("an id may be used again once its request has ended")
def used_ids(driver: Driver) -> None:
    request = driver.request()
    first = driver.run(request)[0]
    _equal(first, driver.run(request)[0], "with the same id")


@check("an aborted request ends at every moment: one delta with the reason aborted for each choice")
def aborts(driver: Driver) -> None:
    for moment in MOMENTS:
        request, other = driver.request(max_tokens=40), driver.request()
        driver.add(request, other)
        driver.advance_times(moment)
        driver.engine.abort([request.id, request.id, "unknown"])
        aborted, finished = driver.finish(request, other)
        _ended(aborted, FinishReason.ABORTED)
        _ended(finished, FinishReason.LENGTH)
        driver.engine.abort([request.id])
        driver.settle()


@check("every choice of an aborted request ends", "num_choices")
def aborted_choices(driver: Driver) -> None:
    request = driver.request(num_choices=3, temperature=1.0, max_tokens=40)
    driver.add(request)
    driver.advance_times(3)
    driver.engine.abort([request.id])
    for output in driver.finish(request):
        _ended(output, FinishReason.ABORTED)


@check("a dropped request yields nothing more, at every moment, and its batch mates are untouched")
def drops(driver: Driver) -> None:
    prompt = driver.prompt()
    [alone] = driver.run(driver.request(prompt))
    for moment in MOMENTS:
        request, other = driver.request(max_tokens=40), driver.request(prompt)
        driver.add(request, other)
        driver.advance_times(moment)
        driver.drop([request])
        driver.engine.drop(["unknown"])
        _equal(alone, driver.finish(other)[0], f"beside one dropped after {moment} steps")
        expect(driver.outputs[request.id, 0].finish is None, "a dropped request ended with a delta")
        driver.settle()


# ---------------------------------------------------------------- room


@check("an idle engine has room for the largest request that it may be offered")
def room_when_idle(driver: Driver) -> None:
    room = driver.engine.room()
    expect(room.over_class is None, "the room of an idle engine is that of running sequences")
    expect(room.kv_tokens >= driver.engine.most_offered_tokens, f"room for {room.kv_tokens} tokens")
    expect(room.sequences == driver.engine.stats.num_places, f"room for {room.sequences} sequences")


@check("room shrinks by what runs, and returns to its start when requests end, are aborted or dropped")
def room_returns(driver: Driver) -> None:
    before = driver.engine.room()
    endings: tuple[Callable[[list[Request]], object], ...] = (
        lambda requests: driver.finish(*requests),
        lambda requests: driver.engine.abort([request.id for request in requests]),
        driver.drop,
    )
    for end in endings:
        requests = [driver.request(max_tokens=24) for _ in range(3)]
        driver.add(*requests)
        driver.advance_times(2)
        driver.advance_until(lambda: driver.engine.num_uncounted == 0, "the requests are counted")
        during = driver.engine.room()
        end(requests)
        driver.settle()
        expect(during.sequences <= before.sequences - 3, f"room for {during.sequences} sequences beside 3 that run")
        expect(during.kv_tokens < before.kv_tokens, "as much room for tokens beside requests that run")
        expect(driver.engine.room() == before, f"{before} before, {driver.engine.room()} after")


@check("while a request waits there is no free room")
def no_room_while_some_wait(driver: Driver) -> None:
    requests = [driver.request(max_tokens=24) for _ in range(driver.engine.stats.num_places + 2)]
    driver.add(*requests)
    driver.advance_times(2)
    driver.advance_until(lambda: driver.engine.num_uncounted == 0, "the requests are counted")
    room, num_waiting = driver.engine.room(), driver.engine.stats.num_waiting
    driver.drop(requests)
    driver.settle()
    expect(num_waiting > 0, "more requests than places, and none waits")
    expect(not room.is_some or room.over_class is not None, f"{room} while {num_waiting} wait")


# ---------------------------------------------------------------- stops


@check("a stop string ends the output before it, also one that spans tokens", "stop")
def stop_strings(driver: Driver) -> None:
    prompt, text = _with_text(driver)
    for begin, end in ((3, 4), (4, 7), (len(text) - 2, len(text))):
        stop = text[begin:end]
        [output] = driver.run(driver.request(prompt, max_tokens=32, stop=(stop,)))
        _ended(output, FinishReason.STOP, stop)
        expect(output.text == text[: text.index(stop)], f"text {output.text!r} before the stop string {stop!r}")


@check("the first of several stop strings counts", "stop")
def several_stop_strings(driver: Driver) -> None:
    for _ in range(_NUM_TEXTS):
        prompt, text = _with_text(driver)
        first, second = text[3:5], text[8:12]
        if text.index(first) + len(first) <= text.index(second):
            break
    else:
        raise LeftOut
    [output] = driver.run(driver.request(prompt, max_tokens=32, stop=(second, first)))
    _ended(output, FinishReason.STOP, first)
    expect(output.text == text[: text.index(first)], f"text {output.text!r} before the stop string {first!r}")


@check("a stop token ends the output", "stop_token_ids")
def stop_tokens(driver: Driver) -> None:
    prompt = driver.prompt()
    token_ids = driver.run(driver.request(prompt))[0].token_ids
    stop = token_ids[5]
    [output] = driver.run(driver.request(prompt, stop_token_ids=(stop,)))
    _ended(output, FinishReason.STOP, stop)
    expect(output.token_ids == token_ids[: token_ids.index(stop) + 1], f"{len(output.token_ids)} tokens")


@check("an end-of-sequence token ends the output unless it is ignored", "logit_bias", "ignore_eos")
def end_of_sequence(driver: Driver) -> None:
    eos = min(driver.subject.eos_token_ids)
    bias = {eos: 100.0}
    [ended] = driver.run(driver.request(logit_bias=bias, ignore_eos=False))
    _ended(ended, FinishReason.STOP)
    expect(ended.token_ids == [eos], f"tokens {ended.token_ids} with a bias of 100 to {eos}")
    [ignored] = driver.run(driver.request(logit_bias=bias, ignore_eos=True))
    _ended(ignored, FinishReason.LENGTH)


@check("no end-of-sequence token ends the output before min_tokens", "logit_bias", "min_tokens")
def min_tokens(driver: Driver) -> None:
    bias = {min(driver.subject.eos_token_ids): 100.0}
    [output] = driver.run(driver.request(logit_bias=bias, ignore_eos=False, min_tokens=5))
    _ended(output, FinishReason.STOP)
    expect(len(output.token_ids) == 6, f"{len(output.token_ids)} tokens with min_tokens 5")


# ---------------------------------------------------------------- sampling


@check("a seed gives the same tokens each time, and another seed others", "seed")
def seeds(driver: Driver) -> None:
    prompt = driver.prompt()

    def tokens(seed: int) -> list[int]:
        return driver.run(driver.request(prompt, temperature=1.5, seed=seed, max_tokens=24))[0].token_ids

    expect(tokens(7) == tokens(7), "the same seed gave other tokens")
    expect(tokens(7) != tokens(8), "two seeds gave the same tokens")
    expect(tokens(2**64 - 1) == tokens(2**64 - 1), "the largest seed gave other tokens")


@check("the choices of a request differ, and the first is that of a request for one", "num_choices", "seed")
def choices(driver: Driver) -> None:
    prompt = driver.prompt()
    three = driver.run(driver.request(prompt, num_choices=3, temperature=1.5, seed=5, max_tokens=24))
    [alone] = driver.run(driver.request(prompt, temperature=1.5, seed=5, max_tokens=24))
    expect(len({tuple(output.token_ids) for output in three}) == 3, "choices have the same tokens")
    _equal(alone, three[0], "as the first of three choices")


@check("top_k of 1 and a tiny top_p are greedy", "top_k", "top_p")
def filters(driver: Driver) -> None:
    prompt = driver.prompt()
    [greedy] = driver.run(driver.request(prompt))
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        [output] = driver.run(driver.request(prompt, temperature=1.0, **options))
        _equal(greedy, output, f"with {options}")


@check("a bias of -100 bans a token", "logit_bias")
def banned_tokens(driver: Driver) -> None:
    prompt = driver.prompt()
    banned = driver.run(driver.request(prompt))[0].token_ids[0]
    [output] = driver.run(driver.request(prompt, logit_bias={banned: -100.0}))
    expect(banned not in output.token_ids, "a token with a bias of -100 was drawn")


@check("a large frequency penalty changes the output", "frequency_penalty")
def penalties(driver: Driver) -> None:
    prompt = driver.prompt()
    plain, penalised = (
        driver.run(driver.request(prompt, max_tokens=48, frequency_penalty=penalty))[0] for penalty in (0.0, 2.0)
    )
    if len(set(plain.token_ids)) == len(plain.token_ids):
        raise LeftOut
    expect(penalised.token_ids != plain.token_ids, "the penalty changed nothing")


@check("each token has its log-probability and those of the most likely tokens, in order", "logprobs")
def log_probabilities(driver: Driver) -> None:
    [output] = driver.run(driver.request(logprobs=3))
    expect(len(output.logprobs) == len(output.token_ids), f"{len(output.logprobs)} for {len(output.token_ids)} tokens")
    for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
        values = [value for _, value in found.top]
        expect(len(values) == 3 and values == sorted(values, reverse=True), f"most likely tokens {found.top}")
        expect(found.chosen <= 0 and all(value <= 0 for value in values), f"a log-probability over 0: {found}")
        expect(dict(found.top).get(token_id, found.chosen) == found.chosen, f"two values for one token: {found}")
    [without] = driver.run(driver.request())
    expect(not without.logprobs, "log-probabilities that were not requested")


@check("the vector of a prompt does not depend on other requests, and a request for it has no tokens", "embed")
def vectors(driver: Driver) -> None:
    prompts = [driver.prompt(length) for length in (1, 12, 40)] * 2
    pooled: list[Embed] = [Embed(pooling=pooling) for pooling in ("last", "mean")]
    requests = [driver.request(prompt, max_tokens=0, embed=embed) for prompt in prompts for embed in pooled]
    alone = [driver.run(driver.request(one.prompt_token_ids, max_tokens=0, embed=one.embed))[0] for one in requests]
    texts = [driver.request() for _ in range(3)]
    for one, other in zip(alone, driver.run(*requests, *texts), strict=False):
        _ended(other, FinishReason.STOP)
        expect(not other.token_ids, f"{len(other.token_ids)} tokens with a vector")
        first, second = _vector(one), _vector(other)
        nearness = sum(a * b for a, b in zip(first, second, strict=True))
        expect(abs(nearness - 1) < _NEAR, f"another vector in a batch: {nearness} of 1")


@check("each token of a prompt but the first has its log-probability, also with max_tokens 0", "prompt_logprobs")
def prompt_log_probabilities(driver: Driver) -> None:
    prompt = driver.prompt(20)
    scored, continued, again = (
        driver.run(driver.request(prompt, max_tokens=most, prompt_logprobs=2))[0] for most in (0, 4, 0)
    )
    plain = driver.run(driver.request(prompt, max_tokens=4))[0]
    _ended(scored, FinishReason.LENGTH)
    expect(continued.token_ids == plain.token_ids, "other tokens after log-probabilities of the prompt")
    rows = [output.prompt.logprobs or () if output.prompt is not None else () for output in (scored, continued, again)]
    expect([len(row) for row in rows] == [20] * 3, f"log-probabilities of {[len(row) for row in rows]} tokens of 20")
    for first, *others in zip(*rows, strict=True):
        expect(first.chosen <= 0, f"a log-probability over 0: {first}")
        expect(all(abs(other.chosen - first.chosen) < _NEAR for other in others), "other log-probabilities each time")


# ---------------------------------------------------------------- priorities, failures, idleness


@check("among waiting requests, one of a higher priority starts first")
def priorities(driver: Driver) -> None:
    running = [driver.request(max_tokens=12 + 4 * number) for number in range(driver.engine.stats.num_places)]
    driver.add(*running)
    driver.advance_times(1)
    low, high = driver.request(max_tokens=8), driver.request(max_tokens=8, priority=9)
    driver.add(low, high)
    starts_s = [output.first_scheduled_s or 0.0 for output in driver.finish(low, high, *running)[:2]]
    expect(all(starts_s), "a request has no time of its start")
    # An engine in another process may have ended all others meanwhile: then both start at once.
    expect(starts_s[1] <= starts_s[0], "the request of the lower priority started first")


@check("a request whose steps raise fails alone")
def failing_request(driver: Driver) -> None:
    break_steps_of = driver.subject.break_steps_of
    if break_steps_of is None:
        raise LeftOut
    prompt = driver.prompt()
    [alone] = driver.run(driver.request(prompt))
    bad, good = driver.request(), driver.request(prompt)
    break_steps_of(bad.id)
    failed, finished = driver.run(bad, good)
    _ended(failed, FinishReason.ERROR)
    expect(failed.finish is not None and not failed.finish.is_rejection, "the failure is marked as a rejection")
    _equal(alone, finished, "beside a request whose steps raise")
    _equal(alone, driver.run(driver.request(prompt))[0], "after a request whose steps raised")


@check("an idle engine says so: no output, nothing stalled, infinitely long")
def idleness(driver: Driver) -> None:
    engine = driver.engine
    expect(engine.idle_s == float("inf"), f"idle for {engine.idle_s} s")
    expect(engine.advance() == [] and engine.stalled() == [], "output or stalled requests of an idle engine")
    driver.add(driver.request(max_tokens=2))
    driver.advance_until(lambda: (engine.num_uncounted == 0 and engine.idle_s == 0) or driver.is_idle, "it is busy")
    driver.settle()


@check("its counters grow by what was computed")
def counters(driver: Driver) -> None:
    before = driver.engine.stats
    driver.run(*[driver.request(max_tokens=6) for _ in range(3)])
    driver.advance_until(lambda: driver.is_idle, "the engine is idle")
    after = driver.engine.stats
    expect(after.num_output_tokens - before.num_output_tokens == 18, "not 18 output tokens more")
    expect(after.num_steps > before.num_steps, "no step was counted")
    expect((after.num_running, after.num_waiting) == (0, 0), f"{after.num_running} run, {after.num_waiting} wait")
    expect(after.kv_tokens_used == 0, f"{after.kv_tokens_used} tokens of the cache are held")


@check("iterations are described while someone watches, and no longer")
def watching(driver: Driver) -> None:
    numbers: list[int] = []
    driver.engine.watch(lambda iteration: numbers.append(iteration.number))
    driver.run(driver.request())
    driver.advance_until(lambda: bool(numbers), "an iteration is described")
    driver.engine.watch(None)
    driver.settle()
    described = len(numbers)
    driver.run(driver.request())
    driver.settle()
    expect(numbers == sorted(set(numbers)), f"iterations {numbers}")
    expect(len(numbers) == described, "iterations are described though nobody watches")


@check("progress whose next token is known to be the last ends at once")
def progress_at_the_end(driver: Driver) -> None:
    prompt = driver.prompt()
    [whole] = driver.run(driver.request(prompt))
    before = ChoiceProgress(token_ids=tuple(whole.token_ids))
    [rest] = driver.run(driver.request(prompt, progress=(before,)))
    expect(not rest.token_ids, f"{rest.token_ids} after all tokens")
    _ended(rest, FinishReason.LENGTH)


@check("it can be described by any thread, while it computes")
def description(driver: Driver) -> None:
    driver.add(request := driver.request(max_tokens=24))
    driver.advance_times(1)
    lines: list[list[str] | None] = []
    thread = threading.Thread(target=lambda: lines.append(driver.engine.describe()))
    thread.start()
    thread.join()
    driver.finish(request)
    expect(len(lines) == 1, "describe raised on another thread")


# ---------------------------------------------------------------- helpers


def _vector(output: Output) -> list[float]:
    vector = None if output.prompt is None else output.prompt.embedding
    expect(vector is not None, "no vector of a prompt")
    return list(array("f", vector or b""))


def _ended(output: Output, reason: FinishReason, stop: str | int | None = None) -> None:
    expect(output.finish is not None and output.finish.reason is reason, f"ended with {output.finish}, not {reason}")
    expect(output.finish is not None and output.finish.stop == stop, f"ended with {output.finish}, not at {stop!r}")


def _equal(one: Output, other: Output, when: str) -> None:
    expect(one.token_ids == other.token_ids, f"other tokens {when}: {one.token_ids} and {other.token_ids}")
    expect(one.text == other.text, f"other text {when}: {one.text!r} and {other.text!r}")
    expect(one.finish == other.finish, f"another end {when}: {one.finish} and {other.finish}")


def _rejected(driver: Driver, request: Request) -> None:
    try:
        driver.engine.validate(request)
    except RequestRejected:
        return
    raise Violation(f"a request of {len(request.prompt_token_ids)} prompt tokens was not rejected")


def _with_text(driver: Driver) -> tuple[tuple[int, ...], str]:
    """Return a prompt, and the text of its greedy output, which is long enough to find stop strings in."""
    for _ in range(_NUM_TEXTS):
        prompt = driver.prompt()
        text = driver.run(driver.request(prompt, max_tokens=32))[0].text
        if len(text) >= 12 and text.isprintable():
            return prompt, text
    raise Violation("no output of 32 tokens has a text of 12 printable characters")


def checks_for(refused_options: frozenset[str]) -> Mapping[str, Check]:
    """Return the checks that use no refused option."""
    return {name: each for name, each in CHECKS.items() if refused_options.isdisjoint(each.needs)}
