"""The whole service compared with the bare engine, in the same run: section "service" of `benchmarks gpu`.

A worker process on the GPU, its queue on a separate server (append-only file), its history in SQLite. First saturated,
all jobs at once; then Poisson arrivals at fractions of the bare engine's throughput.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator

from benchmarks.gpu.process import Groups
from benchmarks.gpu.report import Line
from benchmarks.gpu.scale import Scale


def groups(scale: Scale) -> Groups:
    """Return one group: a line with the missing component, or the service's cost and waiting times."""
    return {"service": lambda: _service(scale)}


def _service(scale: Scale) -> Iterator[Line]:
    """Yield the service's cost and the waiting times of its jobs, or a line with the missing component."""
    try:
        from benchmarks.gpu.service import load as gpu_service_load
        from sluice.producer.contract.transport.embedded import find_binary
        from sluice.producer.errors import EmbeddedServerError
    except ImportError as error:
        yield Line("service", {"note": f"not present: the package {error.name}"})
        return
    try:
        find_binary()
    except EmbeddedServerError as error:
        yield Line("service", {"note": f"not present: {error}"})
        return
    yield from gpu_service_load.lines(scale)
