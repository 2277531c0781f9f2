"""Draw a recording as an animated SVG: text that appears, changes and scrolls as it did in the terminal.

Every line is stored once for each content that it had, with the part of the recording in which it is visible. Where
animations are off the picture is the terminal's last screen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tools.pictures.recording import Recording
from tools.pictures.screen import Line, Screen, Style

FRAME_S = 0.12
"""At most one frame in this time."""
HOLD_S = 6.0
"""How long the last screen stays before the recording starts again."""

CHARACTER, LINE, TITLE, PADDING = 8.0, 16, 30, 14
"""Pixels: the advance of a character, a line's height, the title bar's height, and the space around the text."""

STYLE = """
svg{--back:#fff;--edge:#d0d7de;--bar:#f6f8fa;--text:#1f2328;--dim:#6e7781;--32:#1a7f37;--33:#9a6700;--36:#1b7c83;
--197:#cf222e;--70:#1a7f37;--237:#d0d7de}
@media(prefers-color-scheme:dark){svg{--back:#0d1117;--edge:#30363d;--bar:#161b22;--text:#e6edf3;--dim:#8b949e;
--32:#3fb950;--33:#d29922;--36:#39c5cf;--197:#ff7b72;--70:#3fb950;--237:#30363d}}
text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;
fill:var(--text);white-space:pre}
.b{font-weight:600}.d{fill:var(--dim)}.i{font-style:italic}.gone{visibility:hidden}
"""


@dataclass(frozen=True, slots=True)
class Appearance:
    """One content of a line, and the frames in which it is visible."""

    row: int
    line: Line
    first: int
    end: int
    """The first frame without it; the number of frames where it stays."""


@dataclass(frozen=True, slots=True)
class Film:
    """The frames of a recording."""

    times_s: tuple[float, ...]
    num_lines: tuple[int, ...]
    """How many lines have been printed by each frame."""
    appearances: tuple[Appearance, ...]

    @property
    def duration_s(self) -> float:
        """The length of one repetition."""
        return self.times_s[-1] + HOLD_S

    def percent(self, frame: int) -> str:
        """When a frame begins, as a share of a repetition."""
        return f"{100 * self.times_s[frame] / self.duration_s:.2f}".rstrip("0").rstrip(".") + "%"


def draw(recording: Recording, *, title: str) -> str:
    """Draw a recording under a title bar."""
    film = _develop(recording)
    width = round(recording.columns * CHARACTER) + 2 * PADDING
    height = TITLE + recording.rows * LINE + PADDING
    num_frames = len(film.times_s)
    moments = sorted({(a.first, a.end) for a in film.appearances} - {(0, num_frames)})
    names = {moment: f"k{number}" for number, moment in enumerate(moments)}
    body = "\n".join(_text(a, names.get((a.first, a.end)), is_last=a.end == num_frames) for a in film.appearances)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<title>{escape(title)}</title>
<style>{STYLE}{_colors(film)}
@media(prefers-reduced-motion:no-preference){{
{_rules(film, names, recording.rows)}
}}</style>
<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="var(--back)" stroke="var(--edge)"/>
<path d="M1 {TITLE}V8.5A7.5 7.5 0 0 1 8.5 1H{width - 8.5}A7.5 7.5 0 0 1 {width - 1} 8.5V{TITLE}z" fill="var(--bar)"/>
<text class="d" x="{width / 2}" y="20" text-anchor="middle">{escape(title)}</text>
<svg y="{TITLE + PADDING // 2}" width="{width}" height="{recording.rows * LINE}"><g class="scroll">
{body}
</g></svg>
</svg>
"""


def _develop(recording: Recording) -> Film:
    """Cut a recording into frames."""
    screen, shown = Screen(), dict[int, tuple[Line, int]]()
    times_s, num_lines, appearances = list[float](), list[int](), list[Appearance]()
    for time_s, text in _frames(recording):
        screen.feed(text)
        frame = len(times_s)
        times_s.append(time_s)
        num_lines.append(_last_line(screen) + 1)
        for row in range(len(screen.lines)):
            line = screen.runs(row)
            before, first = shown.get(row, ((), frame))
            if line != before:
                appearances += [Appearance(row, before, first, frame)] if before else []
                shown[row] = (line, frame)
    appearances += [Appearance(row, line, first, len(times_s)) for row, (line, first) in shown.items() if line]
    return Film(tuple(times_s), tuple(num_lines), tuple(appearances))


def _frames(recording: Recording) -> Iterator[tuple[float, str]]:
    """The text printed by each frame, with the time of its last part; the first frame is at 0."""
    pending, began_s = "", 0.0
    for time_s, text in recording.output:
        if pending and time_s - began_s >= FRAME_S:
            yield began_s, pending
            pending, began_s = "", time_s
        pending += text
    yield began_s, pending


def _last_line(screen: Screen) -> int:
    return max((row for row in range(len(screen.lines)) if screen.runs(row)), default=0)


def _rules(film: Film, names: dict[tuple[int, int], str], rows: int) -> str:
    """When each content is visible, and how far the text has scrolled."""
    timing = f"{film.duration_s:.2f}s step-end infinite"
    rules = [f"*{{animation:{timing}}}", ".scroll{animation-name:scroll}"]
    for (first, end), name in names.items():
        start = "0%{visibility:hidden}" if first else ""
        stop = f"{film.percent(end)}{{visibility:hidden}}" if end < len(film.times_s) else ""
        rules.append(f".{name}{{animation-name:{name}}}")
        rules.append(f"@keyframes {name}{{{start}{film.percent(first)}{{visibility:visible}}{stop}}}")
    steps, scrolled = "", -1
    for frame, num_lines in enumerate(film.num_lines):
        if max(num_lines - rows, 0) != scrolled:
            scrolled = max(num_lines - rows, 0)
            steps += f"{film.percent(frame)}{{transform:translateY(-{scrolled * LINE}px)}}"
    rules.append(f"@keyframes scroll{{{steps}}}")
    return "\n".join(rules) + f"\n}}.scroll{{transform:translateY(-{scrolled * LINE}px)"


def _colors(film: Film) -> str:
    colors = {style.color for a in film.appearances for _, style in a.line if style.color}
    return "".join(f".c{color}{{fill:var(--{color})}}" for color in sorted(colors))


def _text(appearance: Appearance, name: str | None, *, is_last: bool) -> str:
    """One content of a line."""
    classes = " ".join(filter(None, [name, None if is_last else "gone"]))
    length = sum(len(text) for text, _ in appearance.line)
    runs = "".join(_run(text, style) for text, style in appearance.line)
    y = (appearance.row + 1) * LINE - 4
    kind = f' class="{classes}"' if classes else ""
    return f'<text{kind} x="{PADDING}" y="{y}" textLength="{length * CHARACTER:g}">{runs}</text>'


def _run(text: str, style: Style) -> str:
    marks = {"b": style.is_bold, "d": style.is_dim, "i": style.is_italic, f"c{style.color}": bool(style.color)}
    classes = " ".join(name for name, is_set in marks.items() if is_set)
    return f'<tspan class="{classes}">{escape(text)}</tspan>' if classes and text.strip() else escape(text)
