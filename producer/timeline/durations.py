"""Formatting of durations. No I/O."""

DASH = "\u2013"
UNITS = ((86_400, "d"), (3600, "h"), (60, "m"))


def seconds(value: float | None) -> str:
    """Format a duration: 12 ms, 1.2 s, 3 m 20 s."""
    if value is None:
        return DASH
    if value < 1:
        return f"{max(0, round(value * 1000))} ms"
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    for number, (size, unit) in enumerate(UNITS):
        if whole >= size:
            smaller, name = UNITS[number + 1] if number + 1 < len(UNITS) else (1, "s")
            return f"{whole // size} {unit} {whole % size // smaller} {name}"
    return f"{whole} s"
