"""The whole service beside the bare engine, in the same run: `benchmarks.gpu`'s section "service".

A worker process on the card, its queue on a server of its own (append-only file), its history in SQLite. Saturated, all
jobs at once; then jobs that come at random (Poisson) at fractions of what the bare engine can do.
"""

# torch's types are partial.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator

from benchmarks.gpu_report import Line
from benchmarks.gpu_scale import Scale


def service(scale: Scale) -> Iterator[Line]:
    """What the service costs and how long its jobs wait, or a line that says what it lacks here."""
    try:
        from benchmarks import gpu_service_load
        from producer.embedded import find_binary
        from producer.errors import EmbeddedServerError
    except ImportError as error:
        yield Line("service", {"note": f"not present: the package {error.name}"})
        return
    try:
        find_binary()
    except EmbeddedServerError as error:
        yield Line("service", {"note": f"not present: {error}"})
        return
    yield from gpu_service_load.lines(scale)
