"""Inject faults into an executor, for recovery tests. Knows no tensors and no queue."""

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sluice.engine.batch import Batch, Sampled, ScheduledSequence
from sluice.engine.errors import EngineBroken
from sluice.engine.executor import Executor, Launched, ModelLimits


class FaultKind(StrEnum):
    """Kind of fault."""

    FAIL = "fail"
    """The step raises."""

    NAN = "nan"
    """The row has no usable logits."""

    HANG = "hang"
    """The step never returns."""

    KILL = "kill"
    """The process dies by SIGKILL."""

    ABORT = "abort"
    """The process dies by SIGABRT, as with a corrupt heap."""

    EXIT = "exit"
    """The process ends at once with exit code 0, as a library may end it."""

    LOSE = "lose"
    """The device is lost: EngineBroken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that occurs when a sequence is about to sample a given token."""

    kind: FaultKind
    at: int
    """Offset of the output token that triggers the fault."""

    request_id: str | None = None
    """Id of the affected request. None: any."""

    times: int | None = None
    """Number of occurrences, of which a resumed sequence has had one. None: always."""


_MARK = re.compile(rf"\[\[({'|'.join(FaultKind)})@(\d+)(?:x(\d+))?\]\]")


def faults_in(prompt: str) -> list[Fault]:
    """Read the faults in a prompt: `[[kill@7]]` kills when token 7 is due, `[[fail@3x2]]` fails twice."""
    return [
        Fault(kind=FaultKind(kind), at=int(at), times=int(times) if times else None)
        for kind, at, times in _MARK.findall(prompt)
    ]


class ChaoticExecutor:
    """An `Executor` that wraps another one and injects faults."""

    def __init__(
        self,
        executor: Executor,
        faults: Iterable[Fault] = (),
        *,
        read_prompt: Callable[[list[int]], str] | None = None,
    ) -> None:
        """Wrap `executor`.

        Args:
            executor: computes the steps without a fault.
            faults: the faults to inject.
            read_prompt: decodes a prompt, which may then contain faults (see `faults_in`).
        """
        self._executor = executor
        self._faults = tuple(faults)
        self._read_prompt = read_prompt
        self._asked: dict[int, list[Fault]] = {}
        self._num_happened: Counter[tuple[int, Fault]] = Counter()

    @property
    def limits(self) -> ModelLimits:
        """See `Executor.limits`."""
        return self._executor.limits

    @property
    def lag(self) -> int:
        """See `Executor.lag`."""
        return self._executor.lag

    @property
    def fingerprint(self) -> str:
        """See `Executor.fingerprint`."""
        return self._executor.fingerprint

    def launch(self, batch: Batch) -> Launched:
        """See `Executor.launch`."""
        sampling = [scheduled for scheduled in batch.sequences if scheduled.samples]
        due = [self._due(scheduled) for scheduled in sampling]
        for fault in due:
            if fault is not None:
                _happen(fault.kind)
        launched = self._executor.launch(batch)
        return _Spoilt(launched, due) if any(due) else launched

    def forget(self, sequence_ids: list[int]) -> None:
        """See `Executor.forget`."""
        self._executor.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._asked.pop(sequence_id, None)

    def _due(self, scheduled: ScheduledSequence) -> Fault | None:
        """Return the fault of this sequence in this step, and count the occurrence."""
        sequence = scheduled.sequence
        for fault in (*self._faults, *self._asked_by(scheduled)):
            position = scheduled.start + scheduled.num_tokens - sequence.num_prompt_tokens
            is_meant = fault.request_id in (None, sequence.request_id) and fault.at == position
            num_happened = self._num_happened[sequence.id, fault] + (sequence.num_resumed_tokens > 0)
            if is_meant and (fault.times is None or num_happened < fault.times):
                self._num_happened[sequence.id, fault] += 1
                return fault
        return None

    def _asked_by(self, scheduled: ScheduledSequence) -> list[Fault]:
        if self._read_prompt is None:
            return []
        sequence = scheduled.sequence
        asked = self._asked.get(sequence.id)
        if asked is None:
            prompt = self._read_prompt(sequence.token_ids[: sequence.num_prompt_tokens])
            asked = self._asked[sequence.id] = faults_in(prompt)
        return asked


_NAN_ROW = Sampled((), error="the model's logits are not numbers")


class _Spoilt(NamedTuple):
    """A step in which some rows have faults."""

    launched: Launched
    due: list[Fault | None]
    """The fault of each row."""

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        rows = self.launched.collect()
        return [row if fault is None else _NAN_ROW for row, fault in zip(rows, self.due, strict=True)]


def _happen(kind: FaultKind) -> None:
    match kind:
        case FaultKind.FAIL:
            raise RuntimeError("injected failure")
        case FaultKind.LOSE:
            raise EngineBroken("injected loss of the device")
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.ABORT:
            os.abort()
        case FaultKind.EXIT:
            os._exit(0)
        case FaultKind.HANG:
            threading.Event().wait()
        case FaultKind.NAN:
            pass
