"""Inject faults into an executor, for recovery tests. Knows no tensors and no queue."""

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from sluice.engine.batch import NO_DRAFTS, Admission, Batch, Masks, Sampled, ScheduledRow
from sluice.engine.errors import EngineBroken
from sluice.engine.executor import DrawnLater, Executor, Launched, ModelLimits


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
        self._admitted: dict[int, Admission] = {}
        """By slot."""

        self._asked: dict[int, list[Fault]] = {}
        """By slot: the faults in its prompt."""

        self._num_resumed: dict[int, int] = {}
        """By sequence: the tokens of earlier attempts, with which it was first admitted."""

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
        for admission in batch.admissions:
            self._note(admission)
        due = [self._due(row) for row in batch.rows if row.samples]
        for fault in due:
            if fault is not None:
                _happen(fault.kind)
        # A fault has a position, which a draft would pass over.
        launched = self._executor.launch(replace(batch, drafts=NO_DRAFTS) if batch.drafts else batch)
        return _Spoilt(launched, due) if any(due) else launched

    def _note(self, admission: Admission) -> None:
        self._admitted[admission.slot] = admission
        num_output_tokens = len(admission.token_ids) - admission.num_prompt_tokens
        self._num_resumed.setdefault(admission.sequence_id, num_output_tokens)
        if self._read_prompt is not None:
            prompt = list(admission.token_ids[: admission.num_prompt_tokens])
            self._asked[admission.slot] = faults_in(self._read_prompt(prompt))

    def _due(self, row: ScheduledRow) -> Fault | None:
        """Return the fault of a sequence in this step, and count the occurrence."""
        admission = self._admitted[row.slot]
        position = row.start + row.num_tokens - admission.num_prompt_tokens
        # A row that decodes may have tokens that a grammar forced: faults at their positions happen now.
        before = row.start - admission.num_prompt_tokens if row.start >= admission.num_prompt_tokens else position - 1
        has_resumed = self._num_resumed[row.sequence_id] > 0
        for fault in (*self._faults, *self._asked.get(row.slot, ())):
            is_meant = fault.request_id in (None, admission.request_id) and before < fault.at <= position
            num_happened = self._num_happened[row.sequence_id, fault] + has_resumed
            if is_meant and (fault.times is None or num_happened < fault.times):
                self._num_happened[row.sequence_id, fault] += 1
                return fault
        return None


_NAN_ROW = Sampled((), error="the model's logits are not numbers")


class _Spoilt(NamedTuple):
    """A step in which some rows have faults."""

    launched: Launched
    due: list[Fault | None]
    """The fault of each row."""

    def draw(self, masks: Masks) -> None:
        """See `DrawnLater.draw`."""
        if isinstance(self.launched, DrawnLater):
            self.launched.draw(masks)

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
