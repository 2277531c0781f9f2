"""Make the README's pictures: `python -m tools.pictures` runs the demo, records it, and draws the chart.

Pictures go to `docs/images/`. They have text as text, in the reader's monospace font, and follow the reader's light or
dark color scheme.
"""

import os
import sys
from pathlib import Path

from tools.pictures import animation, chart
from tools.pictures.recording import record

IMAGES = Path(__file__).parents[2] / "docs" / "images"
ROWS, COLUMNS = 30, 100


def main() -> None:
    """Write both pictures."""
    IMAGES.joinpath("compared-engines.svg").write_text(chart.draw(chart.load()))
    recording = record([sys.executable, "-m", "tools.demo"], rows=ROWS, columns=COLUMNS)
    title = f"make demo, on {os.cpu_count()} CPU cores, in real time"
    IMAGES.joinpath("demo.svg").write_text(animation.draw(recording, title=title))


if __name__ == "__main__":
    main()
