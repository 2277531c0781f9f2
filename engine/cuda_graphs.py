"""Steps recorded once and replayed: the device runs a model's hundreds of kernels at one launch.

A recording reads its inputs where they were when it was made, so all steps are copied to the same buffers first, and
leaves its logits in a buffer too, until the next replay of any recording. What it needs in between is one pool of
memory for all: they never run side by side.

`Recorder` is what makes recordings: a card's CUDA graphs, or `EagerRecorder`, which computes anew over the same
buffers, so that everything but the capture itself is tested on a CPU.

Hot: `GraphedDecoder.forward`; no loop over sequences.
"""

# torch's types are partial, and copies of many tensors at once have no public name.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.batch_tensors import BatchTensors
from engine.device_errors import loss_of
from engine.graph_buckets import Bucket

Compute = Callable[[BatchTensors], Tensor]
"""A model's forward: `BatchTensors` to logits `[R, V]`."""

log = logging.getLogger(__name__)

PATIENCE = 32
"""A bucket that was wanted so often is recorded at once, though it takes as long as some steps; others when idle."""

MAX_RECORDINGS = 64
"""Each takes some MiB of the device for its launches, besides what all share."""

_LONG = ("input_ids", "positions", "slot_mapping", "logit_rows")
_OF_TOKENS = frozenset(_LONG[:3])
_SHORT = ("query_start_locs", "context_lens", "block_tables")


class CaptureFailed(RuntimeError):
    """A capture that was begun went wrong: torch may be left amid it, so no other is to be begun."""


class Recording(Protocol):
    """A step that can be computed again and again over the same memory."""

    def replay(self) -> Tensor:
        """Begin to compute it. Logits, valid until the next replay of any recording."""
        ...


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Compute once, and record it. What was computed lies where a replay puts it.

        Raises:
            RuntimeError: it cannot be recorded; the device is well.
            CaptureFailed: nor can anything else from now on.
        """
        ...


@dataclass(frozen=True, slots=True)
class EagerRecording:
    """Computes anew."""

    compute: Callable[[], Tensor]

    def replay(self) -> Tensor:
        """See `Recording.replay`."""
        return self.compute()


class EagerRecorder:
    """Makes recordings that compute anew, on any device."""

    def record(self, compute: Callable[[], Tensor]) -> EagerRecording:
        """See `Recorder.record`."""
        # As a card's does: what is made at the first time is made here.
        compute()
        return EagerRecording(compute)


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """A CUDA graph and where its logits are."""

    graph: "torch.cuda.CUDAGraph"
    logits: Tensor

    def replay(self) -> Tensor:
        """See `Recording.replay`."""
        self.graph.replay()
        return self.logits


class CudaRecorder:
    """Captures CUDA graphs, all with one pool of memory and on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, compute: Callable[[], Tensor]) -> CudaRecording:
        """See `Recorder.record`."""
        # Once beforehand: kernels are compiled and libraries make their workspaces, which a capture cannot.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._captured(compute)

    def _captured(self, compute: Callable[[], Tensor]) -> CudaRecording:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        try:
            # Other threads of this process may use the device meanwhile: their errors are not this capture's.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                logits = compute()
        except Exception as error:
            # A capture that cannot be ended leaves its stream the current one.
            torch.cuda.set_stream(before)
            raise CaptureFailed(f"{type(error).__name__}: {error}") from error
        return CudaRecording(graph, logits)


class GraphedDecoder:
    """A model's forward, recorded by bucket. Changes with each recording."""

    def __init__(self, compute: Compute, recorder: Recorder, *, max_tokens: int, max_rows: int) -> None:
        self._compute = compute
        self._recorder = recorder
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._buffers: dict[str, Tensor] = {}
        self._logits: Tensor | None = None
        """`[max_rows, V]`, made with the first recording. A tensor that is kept in the pool would take its room from
        every later recording."""

        self._recordings: dict[Bucket, Recording | None] = {}
        """None: it cannot be recorded."""

        self._wishes: Counter[Bucket] = Counter()
        self.num_replays = 0
        self._may_record = True
        """Until a capture has failed."""

        self.last_problem: str | None = None
        """Why the last bucket that could not be recorded could not. The first one's is logged."""

    @property
    def recorded(self) -> list[Bucket]:
        """Buckets that are replayed."""
        return [bucket for bucket, recording in self._recordings.items() if recording is not None]

    @property
    def wish(self) -> Bucket | None:
        """What was wanted most often and is not recorded; None where nothing is."""
        if not self._may_record or len(self._recordings) >= MAX_RECORDINGS:
            return None
        return max(self._wishes, key=self._wishes.__getitem__, default=None)

    def has(self, bucket: Bucket) -> bool:
        """Whether `bucket` is replayed."""
        return self._recordings.get(bucket) is not None

    def want(self, bucket: Bucket) -> bool:
        """Take note that `bucket` would have been of use; whether that was so often that it is worth a pause."""
        if not self._may_record or bucket in self._recordings or len(self._recordings) >= MAX_RECORDINGS:
            return False
        self._wishes[bucket] += 1
        return self._wishes[bucket] >= PATIENCE

    def drop_wish(self, bucket: Bucket) -> None:
        """Forget how often `bucket` was wanted."""
        self._wishes.pop(bucket, None)

    def forward(self, tensors: BatchTensors, bucket: Bucket) -> Tensor:
        """Logits `[R, V]` of a step that has the sizes of `bucket`, which is recorded."""
        recording = self._recordings[bucket]
        assert recording is not None, "has(bucket) was asked"
        self._fill(tensors, bucket)
        self.num_replays += 1
        return recording.replay()[: tensors.logit_rows.shape[0]]

    def record(self, bucket: Bucket, tensors: BatchTensors) -> bool:
        """Record `bucket` over `tensors`, which have its sizes and are computed at least once; whether it could be.

        Raises:
            Exception: the device is lost.
        """
        self.drop_wish(bucket)
        if not self._may_record:
            return False
        inputs = self._inputs(tensors, bucket)
        self._fill(tensors, bucket)
        try:
            self._recordings[bucket] = self._recorder.record(lambda: self._computed(inputs))
        except Exception as error:
            # A step that cannot be recorded is computed as before: a card is not to stop work for it.
            if loss_of(error) is not None:
                raise
            self._recordings[bucket] = None
            self._note(error)
            return False
        return True

    def _note(self, error: Exception) -> None:
        """Keep what `error` says, and log it if it is the first."""
        self._may_record = self._may_record and not isinstance(error, CaptureFailed)
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        if self.last_problem is None:
            log.warning("a step cannot be recorded and is launched kernel by kernel: %s", problem)
        self.last_problem = problem

    def _computed(self, inputs: BatchTensors) -> Tensor:
        """Compute, and put the logits where they stay."""
        logits = self._compute(inputs)
        if self._logits is None:
            # A recorder computes once before it records: this is not part of a recording.
            self._logits = logits.new_empty((self._max_rows, logits.shape[1]))
        place = self._logits[: logits.shape[0]]
        return place.copy_(logits)

    def _inputs(self, tensors: BatchTensors, bucket: Bucket) -> BatchTensors:
        """Views of the buffers in the sizes of `bucket`."""
        for name in _LONG + _SHORT:
            like: Tensor = getattr(tensors, name)
            if name not in self._buffers:
                num_rows = self._max_tokens if name in _OF_TOKENS else self._max_rows + 1
                self._buffers[name] = like.new_zeros((num_rows, *like.shape[1:]))
        views = {name: self._buffers[name][: _rows(name, bucket)] for name in _LONG + _SHORT}
        return replace(tensors, **views, max_query_len=bucket.max_query_len, max_context_len=bucket.max_context_len)

    def _fill(self, tensors: BatchTensors, bucket: Bucket) -> None:
        """Copy a step that has the sizes of `bucket` to the buffers."""
        for names in (_LONG, _SHORT):
            sources: list[Tensor] = [getattr(tensors, name) for name in names]
            places = [self._buffers[name][: source.shape[0]] for name, source in zip(names, sources, strict=True)]
            # One launch for all of a dtype.
            torch._foreach_copy_(places, sources)
        num_logit_rows = tensors.logit_rows.shape[0]
        if num_logit_rows < bucket.num_rows:
            # A larger step's rows are none of this one's.
            self._buffers["logit_rows"][num_logit_rows : bucket.num_rows].zero_()


def _rows(name: str, bucket: Bucket) -> int:
    """Rows that an input has in a step of these sizes."""
    if name in _OF_TOKENS:
        return bucket.num_tokens
    return bucket.num_rows + (name == "query_start_locs")
