"""Small SVG files from matplotlib, for pictures that are committed: text stays text, invisible detail is dropped."""

# matplotlib's types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_HREF = f"{{{_XLINK}}}href"
_GEOMETRY = ("d", "x", "y", "transform", "width", "height")
_LINE = 200
"""Characters of a line of the file."""


def save_svg(figure: "Figure", path: Path) -> None:
    """Write `figure` to `path`. The same figure gives the same file."""
    import matplotlib as mpl

    text = StringIO()
    with mpl.rc_context({"svg.hashsalt": "sluice", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    path.write_text(compact(text.getvalue()), encoding="utf-8")


def compact(svg: str) -> str:
    """Return matplotlib's `svg` without metadata, empty groups and digits beyond a tenth of a point."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    used_ids = sorted(set(re.findall(r'(?:href="|url\()#([^")]+)', svg)))
    for number, used_id in enumerate(used_ids):
        svg = svg.replace(f'#{used_id}"', f'#i{number}"').replace(f"#{used_id})", f"#i{number})")
        svg = svg.replace(f'id="{used_id}"', f'id="i{number}"')
    root = ET.fromstring(re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", svg))
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    _trim(root)
    _name_styles(root)
    return _in_lines(ET.tostring(root, encoding="unicode"))


def _trim(element: ET.Element) -> None:
    """Drop unused ids and blanks, round numbers, and replace groups without attributes by their children."""
    if not re.fullmatch(r"i\d+", element.get("id", "")):
        element.attrib.pop("id", None)
    for name in _GEOMETRY:
        if name in element.attrib:
            element.set(name, " ".join(re.sub(r"-?\d+\.\d+", _rounded, element.attrib[name]).split()))
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    children: list[ET.Element] = []
    for child in element:
        _trim(child)
        is_bare = child.tag == f"{{{_SVG}}}g" and not child.attrib
        children += list(child) if is_bare else [child]
    element[:] = children


def _rounded(match: re.Match[str]) -> str:
    return f"{round(float(match[0]), 1):g}"


def _name_styles(root: ET.Element) -> None:
    """Replace styles that several elements share by classes."""
    counts = Counter(style for element in root.iter() if (style := element.get("style")))
    names = {style: f"s{n}" for n, (style, count) in enumerate(counts.most_common()) if count > 1}
    for element in root.iter():
        if (style := element.get("style")) in names:
            del element.attrib["style"]
            element.set("class", names[style])
    sheet = root.find(f".//{{{_SVG}}}style")
    if sheet is not None:
        sheet.text = (sheet.text or "") + "".join(f"\n.{name}{{{style}}}" for style, name in names.items())


def _in_lines(svg: str) -> str:
    """Break `svg` between elements, not inside text."""
    lines = [""]
    for part in re.split(r"(?<=>)(?=<(?!/?tspan|/text))", svg):
        if lines[-1] and len(lines[-1]) + len(part) > _LINE:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines) + "\n"
