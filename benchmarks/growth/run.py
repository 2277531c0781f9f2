"""Growth of cost with queue, streams, context and history. Prints each curve with the exponent that fits it.

    python -m benchmarks growth [--only queued tenants ...] [--scale 0.01] [--out FOLDER]
    python -m benchmarks growth --draw docs/images/growth.json --out docs/images      # measures nothing

The largest sizes are a million queued jobs, 10,000 tenants and readers, 64 workers, 512 running sequences, 128 k tokens
of context and a million rows; `--scale` leaves out the larger ones. Server costs are processor time, so other work on
the machine affects them little. Needs about 3 GiB of memory and ten minutes at full size.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.growth import engine, history, queue
from benchmarks.growth.curves import Curve, read, save, show

PARTS: Mapping[str, tuple[Callable[[Sequence[int]], list[Curve]], Sequence[int]]] = {
    "queued": (queue.by_queued_jobs, (10, 100, 1000, 10_000, 100_000, 1_000_000)),
    "tenants": (queue.by_tenants, (1, 10, 100, 1000, 10_000)),
    "workers": (queue.by_workers, (1, 4, 16, 64)),
    "streams": (queue.by_streams, (1, 8, 64, 512)),
    "channel": (queue.by_channel_length, (512, 2048, 8192, 32_768)),
    "readers": (queue.by_open_readers, (64, 512, 4096, 10_000)),
    "running": (engine.by_running, (1, 8, 64, 512)),
    "context": (engine.by_context, (1024, 8192, 65_536, 131_072)),
    "rows": (history.by_rows, (1000, 10_000, 100_000, 1_000_000)),
}


def main() -> None:
    """Measure the selected parts, or draw the curves of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="measure only these parts")
    parser.add_argument("--scale", type=float, default=1.0, help="leave out sizes above this share of the largest")
    parser.add_argument("--out", type=Path, help="write growth.json, growth.png and growth.svg into this folder")
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="draw the curves of a growth.json instead of measuring"
    )
    given = parser.parse_args()
    curves = read(given.draw) if given.draw else _measured(given.only, given.scale)
    if given.out:
        save(curves, given.out)


def _measured(names: Sequence[str], scale: float) -> list[Curve]:
    curves: list[Curve] = []
    for name in names:
        measure, sizes = PARTS[name]
        for curve in measure([size for i, size in enumerate(sizes) if i < 2 or size <= scale * sizes[-1]]):
            show(curve)
            curves.append(curve)
    return curves


if __name__ == "__main__":
    main()
