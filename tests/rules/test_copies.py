"""Every error and public value of ours survives pickle, copy and deepcopy: processes and caches hand them on."""

import ast
import builtins
import copy
import dataclasses
import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice import producer
from sluice.producer import JobFailed, JobId, QueueUnreachable
from sluice.producer.operations.chains import ChainView
from sluice.producer.operations.dead import DeadFilter
from sluice.producer.operations.submission import Receipt
from sluice.protocol.calls import QueueSettings
from sluice.protocol.chains.chain import After
from sluice.protocol.jobs import Job
from sluice.protocol.wire import ChoiceResult, JobResult, Message, Usage
from sluice.worker.offline.outputs import CompletionOutput, PromptFailed, RequestOutput, StreamOutput
from sluice.worker.offline.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "gateway", "history", "kernels", "migrations", "producer", "protocol", "worker")
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
JOB = JobId("0.default.one")


@cache
def _classes_by_module() -> dict[str, list[tuple[str, list[str]]]]:
    """The classes of each module, each with the names of its bases, without an import."""
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = ".".join(("sluice", *path.relative_to(ROOT).with_suffix("").parts))
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        found[name] = [(node.name, [ast.unparse(base).rpartition(".")[2] for base in node.bases]) for node in nodes]
    return found


def error_classes() -> Iterator[type[BaseException]]:
    """Every error that we declare."""
    names, size = {"Exception", "BaseException", "RedisConnectionError"}, 0
    names |= {name for name, one in vars(builtins).items() if _is_error(one)}
    while size != len(names):
        size = len(names)
        names |= {name for all_of in _classes_by_module().values() for name, bases in all_of if names & {*bases}}
    for module, all_of in _classes_by_module().items():
        for name, bases in all_of:
            if names & {*bases}:
                yield getattr(import_module(module), name)


def _is_error(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, BaseException)


RESULT = JobResult(
    choices=(ChoiceResult(text="a", token_ids=(1,), finish_reason="stop"),),
    usage=Usage(prompt_tokens=1, output_tokens=1),
)
SAMPLES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "IdempotencyConflict": ((JOB,), {}),
    "QueueFull": (("full",), {"reason": "full_jobs", "waiting": (1, 2, 3), "bound": 4, "retry_after_s": 5.0}),
    "LessDurable": ((JOB, "replica:1", "no replica."), {"receipt": Receipt(JOB)}),
    "JobNotFound": ((JOB,), {"advice": "Look."}),
    "BatchNotFound": (("night",), {}),
    "ChainNotFound": (("1-a",), {}),
    "ScheduleNotFound": (("night", "acme"), {}),
    "JobNotDone": ((JOB, "no"), {}),
    "JobFailed": ((JOB, "no"), {"code": "prompt_too_long", "partial": RESULT}),
    "JobCancelled": ((JOB, "no"), {"partial": RESULT}),
    "JobExpired": ((JOB, "no"), {"code": "deadline"}),
    "ConfigError": ((["one", "two"],), {}),
    "ComponentDied": (("puller", OSError("no")), {}),
    "JobDeclined": (("option_refused", "no"), {}),
    "JobRejected": (("prompt_too_long", "no"), {}),
    "PromptFailed": (("prompt_too_long", "no"), {}),
    "HttpError": ((400, "invalid_request_error", "no", "code"), {"param": "n", "headers": {"retry-after": "1"}}),
    "RequestRefused": (("unsupported", "no", "n"), {}),
    "ChannelLost": ((3,), {}),
    "OtherServerAway": ((OSError("no"), 1.0), {}),
}
"""Arguments of the errors that take more than a message."""


def sample_of(kind: type[BaseException]) -> BaseException:
    """One error of a class; a new class that takes more than a message needs a row in SAMPLES."""
    positional, named = SAMPLES.get(kind.__name__, (("a message",), {}))
    return kind(*positional, **named)


class TestGivenEveryError:
    def test_when_it_is_copied_in_any_way_then_message_and_attributes_are_the_same(self) -> None:
        kinds = [kind for kind in error_classes() if not inspect.isabstract(kind) and kind.__name__ != "JobNotDone"]

        for kind in kinds:
            error = sample_of(kind)
            for way in WAYS.values():
                made = way(error)
                assert type(made) is kind
                assert (str(made), repr(made), made.args) == (str(error), repr(error), error.args)
                assert repr(vars(made)) == repr(vars(error))
        assert len(kinds) > 60

    def test_when_one_is_raised_in_a_pool_then_the_pool_goes_on(self) -> None:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            with pytest.raises(JobFailed, match=f"job {JOB} failed: no") as caught:
                pool.apply_async(_fail).get(10)

            assert caught.value.partial == RESULT
            assert pool.apply_async(int).get(10) == 0

    def test_when_an_attribute_was_set_later_then_it_survives(self) -> None:
        error = QueueUnreachable("away")
        error.job_id = JOB
        error.add_note("while submitting")

        for way in WAYS.values():
            assert (way(error).job_id, way(error).__notes__) == (JOB, ["while submitting"])


def _fail() -> None:
    raise JobFailed(JOB, "no", partial=RESULT)


def _is_value(kind: Any) -> bool:
    if not inspect.isclass(kind):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, Enum | tuple)


PUBLIC: list[Any] = [getattr(producer, name) for name in producer.__all__]  # Any: classes, values and functions
VALUES: list[Any] = [
    kind for kind in (*PUBLIC, CompletionOutput, RequestOutput, StreamOutput, SamplingParams) if _is_value(kind)
]
MADE: dict[type[Any], Any] = {
    Job: Job("hello", {"max_tokens": 2}),
    QueueSettings: QueueSettings(),
    Message: Message(role="tool", content="a", tool_call_id="b"),
    DeadFilter: DeadFilter(),
    ChainView: ChainView(id="1-a", after=After((JOB,)), job_ids=(JobId("0.default.two"),), submitted_ms=1),
    SamplingParams: SamplingParams(max_tokens=3, stop=("a",)),
    RequestOutput: RequestOutput(
        prompt="a", prompt_token_ids=(1,), outputs=(), num_cached_tokens=0, error=PromptFailed("bad", "no")
    ),
    StreamOutput: StreamOutput(prompt_index=0, index=0, error=PromptFailed("bad", "no")),
}
"""Values that check themselves, or that hold an error."""


class TestGivenEveryPublicValue:
    @settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
    @given(data=st.data())
    @pytest.mark.parametrize("kind", VALUES, ids=[kind.__name__ for kind in VALUES])
    def test_when_it_is_copied_in_any_way_then_it_is_the_same(self, kind: type[Any], data: st.DataObject) -> None:
        value = MADE.get(kind) or data.draw(st.from_type(kind))

        for way in WAYS.values():
            made = way(value)
            assert type(made) is kind
            assert repr(made) == repr(value)
