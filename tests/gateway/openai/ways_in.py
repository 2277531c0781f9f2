"""The ways in for a request of OpenAI's format, and random bodies for them: each a function of (seed, number) alone."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sluice.gateway.batches.batch import StoredBatch, error_of_line
from sluice.gateway.batches.lines import LineJobsOfBatch
from sluice.gateway.errors import HttpError, error_of, named
from sluice.gateway.requests import parse_json
from sluice.protocol.bulk_files.input import OWN, PROMPTS, BadLine, LineReader
from sluice.protocol.bulk_files.jobs import BulkSpec, LineJobs
from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import Options, PromptLike, template
from sluice.protocol.openai_format.requests import CHAT, COMPLETIONS, ENDPOINTS, Endpoint, RequestRefused, read_request
from tests.end_to_end.processes import ROOT

Json = dict[str, Any]  # Any: JSON

PARAMETERS = re.findall(
    r"^\| `(\w+)` \|", (ROOT / "docs" / "reference" / "http-parameters.md").read_text(), re.MULTILINE
)
"""The names in the table."""

DEEP = json.loads("[" * 200 + "]" * 200)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 21, 65, 0.5, -0.0, 1e308, 10**400, -(10**400), 2**31, 2**63, 2**64, 2**64 - 1),
    *("", "x", "0", "\0", "\u2028", "𝄞", "é" * 600, "9" * 5000, "auto", "none", "text", "medium", "\ud800"),
    *(float("nan"), float("inf"), [], {}, [None], [0], [-1], [2**31], [""], ["a"], ["a", "b"], [["a"]], [[1, 2]], [{}]),
    *([1, "a"], ["a", 1], ["x"] * 17, ["x" * 257], [1] * 65, DEEP, {"5": 1}, {"a": 1}, {"5": "x"}, {"5": 101}),
    *({"a": "b"}, {"": "b"}, {"a": 1}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): 0 for i in range(1025)}),
    *({f"k{i}": "v" for i in range(17)}, {"include_usage": True}, {"include_usage": 1}, {"other": 1}),
    *({"type": "text"}, {"type": "json_object"}, [{"role": "user", "content": "a"}], [{"type": "text", "text": "a"}]),
)  # fmt: skip
FITTING: Mapping[str, tuple[Any, ...]] = {
    "model": ("null", "m" * 512, "m" * 513),
    "max_tokens": (1, 8, 1_000_000, 1_000_001, 1.0),
    "max_completion_tokens": (1, 8, 0, 1_000_001),
    "n": (1, 2, 64), "seed": (7, -1, 2**64 - 1), "temperature": (0, 1, 10_000, 10_001), "top_p": (1, 0.1, 0, 1.1),
    "top_k": (-1, 0, 5, -2), "min_p": (0, 1, 1.1), "stop": ("a", ["a"], [""], "\n"), "min_tokens": (0, 8, 9),
    "presence_penalty": (-2, 2, 2.1), "frequency_penalty": (-2, 2, -2.1), "repetition_penalty": (0.001, 1000, 0),
    "logit_bias": ({"5": 1}, {"5": -101}, {"9" * 11: 1}), "logprobs": (True, False, 3, 20, 21, None),
    "top_logprobs": (0, 20, 21, -1), "stream": (True, False), "stream_options": ({"include_usage": True}, {}),
    "metadata": ({"a": "b"}, {}), "stop_token_ids": ([5], []), "ignore_eos": (True, False), "priority": (0, 9, 10),
    "skip_special_tokens": (True, False), "add_special_tokens": (True, False), "best_of": (1, 2), "echo": (False, True),
    "suffix": ("", "x"), "tools": ([], [{}]), "functions": ([],), "tool_choice": ("none", "auto", "required"),
    "function_call": ("none",), "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},),
    "structured_outputs": ({"regex": "a"}, {"json": {}, "regex": "a"}), "guided_json": ({"type": "object"}, "{}", "x"),
    "guided_regex": ("a",), "guided_choice": (["a"], [""]), "guided_grammar": ('start: "a"',),
    "structured": ({"json_object": True}, {"json_schema": {"a": "\0"}}, {"choice": []}),
    "modalities": (["text"], ["audio"]), "reasoning_effort": ("none", "low"), "verbosity": ("medium", "low"),
}  # fmt: skip
"""Values at and beyond the bounds of each parameter, where they are not among the strange ones."""

MISTAKES = ("max_token", "", "temprature", "\0", "é", "x" * 200, "response", "Model", "top-p", "a b", "n ")
MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "role": ("user", "assistant", "system", "developer", "tool", "function", "bot", None, 1, {}),
    "content": ("a", "", None, [], [{"type": "text", "text": "a"}], [{"type": "image_url"}], [1], 5, {}, "\ud800"),
    "name": ("bob", None, 5, "", []),
    "tool_calls": (None, [], [1]),
    "refusal": (None, "no"),
}


class Asked(NamedTuple):
    """One request."""

    endpoint: Endpoint
    data: bytes
    """Its body."""


class Verdict(NamedTuple):
    """What a way in says: the digest of the job that it makes, or a code and a parameter."""

    digest: bytes | None
    code: str | None = None
    param: str | None = None


# ---------------------------------------------------------------- bodies


def asked(seed: int, number: int) -> Asked:
    """Return a random request."""
    random_ = random.Random(f"{seed} {number}")
    endpoint = random_.choice(ENDPOINTS)
    body = dict(_shuffled(random_, {**_prompt(random_, endpoint), **_parameters(random_)}))
    text = json.dumps(body, ensure_ascii=random_.random() < 0.5)
    data = text.encode("utf-8", "surrogatepass")
    return Asked(endpoint, _harmed(random_, data) if random_.random() < 0.03 else data)


def _shuffled(random_: random.Random, body: Json) -> Iterator[tuple[str, Any]]:
    names = list(body)
    random_.shuffle(names)
    return ((name, body[name]) for name in names)


def _prompt(random_: random.Random, endpoint: Endpoint) -> Json:
    name = "messages" if endpoint == CHAT else "prompt"
    kind = random_.random()
    if kind < 0.02:
        return {}
    if kind < 0.1:
        return {name: random_.choice(STRANGE)}
    if endpoint == COMPLETIONS:
        return {name: random_.choice(("Once", [1, 2], ["Once"], [[1, 2]]))}
    is_sound = kind < 0.7
    return {name: [_message(random_, is_sound=is_sound) for _ in range(random_.randrange(1, 4))]}


def _message(random_: random.Random, *, is_sound: bool) -> object:
    if is_sound or random_.random() < 0.5:
        return {"role": "user", "content": "hello"}
    if random_.random() < 0.1:
        return random_.choice(STRANGE)
    message = {"role": "user", "content": "hello"}
    for name in random_.sample(sorted(MESSAGE), random_.randrange(1, 3)):
        message[name] = random_.choice(MESSAGE[name])
    return message


def _parameters(random_: random.Random) -> Json:
    """Return some parameters; those with values of the right type are more often there, so that several meet."""
    found: Json = {}
    for _ in range(random_.randrange(6)):
        name = random_.choice(MISTAKES) if random_.random() < 0.02 else random_.choice(PARAMETERS)
        if name in PROMPTS:
            continue
        values = FITTING.get(name, ()) if random_.random() < 0.7 else ()
        found[name] = random_.choice(values or STRANGE)
    return found


def _harmed(random_: random.Random, data: bytes) -> bytes:
    place = random_.randrange(len(data))
    piece = random_.choice((b"", b"\xff", b"}", b'"', b",", b"\\ud800", b"1e999", b"[" * 2000))
    return data[:place] + piece + data[place + random_.randrange(2) :]


# ---------------------------------------------------------------- ways in


def verdicts(asked: Asked) -> dict[str, Verdict]:
    """Return what each way in says to a request."""
    enveloped = b'{"custom_id": "a", "method": "POST", "url": "%s", "body": ' % asked.endpoint.encode()
    found = {
        "http": over_http(asked),
        "batch": in_batch(asked.endpoint, enveloped + asked.data + b"}"),
        "bulk": in_file(enveloped + asked.data + b"}"),
    }
    if asked.data.lstrip().startswith(b"{"):  # else the line is none, before it is a request
        found["bulk of an endpoint"] = in_file(asked.data, asked.endpoint)
        if _is_plain(asked):
            found["plain bulk"] = in_file(asked.data)
    return found


def _is_plain(asked: Asked) -> bool:
    """Return whether a line with this alone is of the same endpoint: what it is follows from its prompt."""
    try:
        body = json.loads(asked.data)
    except (ValueError, RecursionError):
        return True
    has_messages = isinstance(body, dict) and body.get("messages") is not None  # pyright: ignore[reportUnknownMemberType]
    return has_messages == (asked.endpoint == CHAT) and not OWN & body.keys()


def over_http(asked: Asked) -> Verdict:
    """Return what the gateway says."""
    try:
        read = read_request(asked.endpoint, parse_json(asked.data))
        with named(read.names):
            return Verdict(_digest(read.prompt, read.options))
    except HttpError as error:
        return Verdict(None, error.code, error.param)
    except RequestRefused as refused:
        error = error_of(refused)
        return Verdict(None, error.code, error.param)


def in_batch(endpoint: Endpoint, line: bytes) -> Verdict:
    """Return what a batch says."""
    batch = StoredBatch(
        id="b",
        tenant="t",
        queue="q",
        partitions=1,
        endpoint=endpoint,
        input_file="f",
        window="1h",
        created_ms=0,
        expires_ms=1,
    )
    jobs = LineJobsOfBatch(batch)
    found = jobs.read(1, line)
    if not isinstance(found, BadLine):
        try:
            jobs.jobs(found)
            return Verdict(_digest(found.prompt, found.options))
        except InvalidJob as error:
            found = found.refused(error)
    described = error_of_line(found)
    return Verdict(None, described["code"], described["param"])


def in_file(line: bytes, endpoint: Endpoint | None = None) -> Verdict:
    """Return what `producer submit` says."""
    found = LineReader(endpoint=endpoint, model=None, defaults=Options()).read(1, line)
    if not isinstance(found, BadLine):
        try:
            LineJobs(BulkSpec(queue="q", batch="b")).job(found)
            return Verdict(_digest(found.prompt, found.options))
        except InvalidJob as error:
            found = found.refused(error)
    return Verdict(None, found.code, found.param)


def _digest(prompt: PromptLike, options: Options) -> bytes:
    """Return a digest of what a job computes, for any owner."""
    return template({**options, "tenant": "default"}).new_job(prompt).digest
