"""CUDA graphs: record a step once and replay it, so that a model's hundreds of kernels need one launch.

A recording reads its inputs at fixed addresses (`inputs`). Its logits stay valid until the next replay of any
recording. All recordings share one memory pool: they never run concurrently.

`CudaGraphRecorder` makes recordings on a GPU. `record_eagerly` recomputes over the same buffers, so that everything
except the capture is tested on a CPU.

Hot: `GraphedDecoder.forward`; no loop over sequences.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from sluice.engine.errors import OutOfMemory
from sluice.engine.execution.device_errors import loss_of, translated
from sluice.engine.execution.recordings.buckets import Bucket
from sluice.engine.execution.recordings.inputs import RecordedInputs
from sluice.kernels.decoder_step import StepInputs

Compute = Callable[[StepInputs], Tensor]
"""A model's forward: `StepInputs` to logits `[R, V]`."""

Draw = Callable[[Tensor], None]
"""A draw from logits `[R, V]`, to fixed addresses too."""

Recording = Callable[[], Tensor]
"""Start computing a recorded step, over the same memory. The logits are valid until the next replay of any recording.
"""

Record = Callable[[Callable[[], Tensor]], Recording]
"""Compute a step once and record it. Results lie where a replay writes them.

Raises `CaptureFailed` if no further step can be recorded; another error leaves the device usable.
"""

log = logging.getLogger(__name__)

PATIENCE = 4
"""Uses after which a bucket is recorded at once: that takes about as long as four steps that are launched kernel by
kernel. Other buckets are recorded when the engine is idle.
"""

PATIENCE_WITHOUT_MEMORY = 256
"""Uses after which a bucket, for which memory was lacking, is tried again."""

MAX_RECORDINGS = 192
"""Each recording takes some MiB of the device for its launches, in addition to the shared pool."""

RECORDING_BYTES = 2**22
"""Estimated memory of one recording; not measured."""


class CaptureFailed(RuntimeError):
    """A capture failed after it began: torch's state is undefined, so no further capture is started."""


def record_eagerly(compute: Callable[[], Tensor]) -> Recording:
    """Return `compute`, which recomputes the step, on any device; see `Record`."""
    # As CUDA capture does: whatever is initialised on first use is initialised here.
    compute()
    return compute


class CudaGraphRecorder:
    """A recorder of CUDA graphs, all in one memory pool and on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """See `Record`."""
        # Run once first: kernel compilation and library workspaces cannot happen during a capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._captured(compute)

    def _captured(self, compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        try:
            # Other threads of this process may use the device meanwhile: their errors must not fail this capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                logits = compute()
        except Exception as error:
            # A capture that cannot be ended leaves its stream current.
            torch.cuda.set_stream(before)
            raise CaptureFailed(f"{type(error).__name__}: {error}") from error

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


class GraphedDecoder:
    """A model's forward and the draw from its logits, recorded by bucket. Mutable: recordings are added."""

    def __init__(self, compute: Compute, draw: Draw, record: Record, inputs: RecordedInputs, *, max_rows: int) -> None:
        self.inputs = inputs
        self._compute = compute
        self._draw = draw
        self._record = record
        self._max_rows = max_rows
        self._logits: Tensor | None = None
        """`[max_rows, V]`, allocated with the first recording, outside the pool: a tensor kept in the pool would
        reserve its memory in every later recording.
        """

        self._recordings: dict[Bucket, Recording | None] = {}
        """None: the bucket cannot be recorded, whatever the memory."""

        self._uses: Counter[Bucket] = Counter()
        self.num_replays = 0
        self._may_record = True
        """True until a capture has failed."""

        self.last_problem: str | None = None
        """Why the last failed bucket could not be recorded. The first failure is logged."""

    @property
    def recorded(self) -> list[Bucket]:
        """Buckets that are replayed."""
        return [bucket for bucket, recording in self._recordings.items() if recording is not None]

    @property
    def most_used(self) -> Bucket | None:
        """The unrecorded bucket that steps used most often; None if there is none."""
        if not self._may_record or len(self._recordings) >= MAX_RECORDINGS:
            return None
        used = [bucket for bucket, count in self._uses.items() if count > 0]
        return max(used, key=self._uses.__getitem__, default=None)

    def has(self, bucket: Bucket) -> bool:
        """Whether `bucket` is replayed."""
        return self._recordings.get(bucket) is not None

    def note_use(self, bucket: Bucket) -> bool:
        """Count a step that could have replayed `bucket`; return whether to record it at once."""
        if not self._may_record or bucket in self._recordings or len(self._recordings) >= MAX_RECORDINGS:
            return False
        self._uses[bucket] += 1
        return self._uses[bucket] >= PATIENCE

    def forget_uses(self, bucket: Bucket) -> None:
        """Forget how often steps used `bucket`."""
        self._uses.pop(bucket, None)

    def forward(self, bucket: Bucket) -> Tensor:
        """Return the logits `[R, V]` of the step in `inputs`, whose bucket is recorded; then rows of no meaning."""
        recording = self._recordings[bucket]
        assert recording is not None, "call has(bucket) first"
        self.num_replays += 1
        return recording()

    def record(self, bucket: Bucket) -> bool:
        """Record `bucket` with the step in `inputs`, which has its sizes and is computed at least once.

        Return whether it succeeded.

        Raises:
            Exception: the device is lost.
        """
        self.forget_uses(bucket)
        if not self._may_record:
            return False
        try:
            self._recordings[bucket] = self._record(lambda: self._computed(bucket))
        except Exception as error:
            # A step that cannot be recorded is launched kernel by kernel: the engine keeps working.
            if loss_of(error) is not None:
                raise
            self._note(error)
            if self._may_record and isinstance(translated(error), OutOfMemory):
                # A moment's shortage must not cost every later step its recording. Memory that a capture itself lacks
                # is another matter: it leaves an undefined state (`CaptureFailed`).
                self._uses[bucket] = PATIENCE - PATIENCE_WITHOUT_MEMORY
            else:
                self._recordings[bucket] = None
            return False
        return True

    def _note(self, error: Exception) -> None:
        """Keep the message of `error`, and log it if it is the first."""
        self._may_record = self._may_record and not isinstance(error, CaptureFailed)
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if self.last_problem is None:
            log.warning("a step cannot be recorded and is launched kernel by kernel: %s", problem)
        self.last_problem = problem

    def _computed(self, bucket: Bucket) -> Tensor:
        """Compute, copy the logits to their fixed buffer, and draw from them."""
        logits = self._compute(self.inputs.tensors(bucket))
        if self._logits is None:
            # A recorder computes once before it records, so this allocation is not part of a recording.
            self._logits = logits.new_empty((self._max_rows, logits.shape[1]))
        place = self._logits[: logits.shape[0]].copy_(logits)
        self._draw(place)
        return place
