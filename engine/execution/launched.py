"""Steps that a model runner has launched: what is left to do when they are collected. Knows no model."""

from typing import NamedTuple

from sluice.engine.batch import Drafts, Sampled, ScheduledRow
from sluice.engine.execution.device_errors import guarded
from sluice.engine.execution.slots import Slots
from sluice.engine.execution.transfers import PendingCopy
from sluice.engine.executor import Launched
from sluice.engine.speculation.verification import verified_rows


class LaunchedStep(NamedTuple):
    """A launched step that translates late errors, most of which surface here, and keeps the tokens that it sampled."""

    launched: Launched
    sampling: list[ScheduledRow]
    slots: Slots
    drafts: Drafts

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        sampled = guarded(self.launched.collect)
        if self.drafts:
            sampled = verified_rows(self.sampling, self.drafts, sampled)
        self.slots.add_tokens(self.sampling, sampled)
        return sampled


class Undrawn(NamedTuple):
    """A step that samples nothing.

    Collecting it still waits for the device, so that the host cannot run ahead without limit.
    """

    pending_copy: PendingCopy

    def collect(self) -> list[Sampled]:
        """See `Launched.collect`."""
        self.pending_copy.wait()
        return []
