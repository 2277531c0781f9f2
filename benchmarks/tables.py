"""Tables as text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows of cells, the head first, as aligned columns: the first to the left, figures to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )
