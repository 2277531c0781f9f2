"""Print every sentence that commands, routes and the library show to a user, to read them as one list.

python -m tools.messages [ROOM…]

Each line has the place, the exception or function that gets the text, and the text, with `{…}` where a value stands.
Texts that a function returns, or that a constant holds, have `-` as the name.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("worker", "gateway", "producer", "history", "protocol", "engine", "kernels", "migrations")
_CODE = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|PRAGMA|CAST|CASE)\b|[\w |]+\[.*\]|.*redis\.p?call", re.DOTALL
)
"""Beginnings of SQL, Lua and annotations in quotes, which are not sentences."""


def messages(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and text of each sentence of a file, in order."""
    yield from sorted(_texts(ast.parse(path.read_text(encoding="utf-8")), "-"))


def _texts(node: ast.AST, name: str) -> Iterator[tuple[int, str, str]]:
    match node:
        case ast.Expr(ast.Constant(str())):
            return  # a docstring
        case ast.Constant(str()) | ast.JoinedStr() | ast.BinOp(_, ast.Add(), _):
            text = _text(node)
            if text.replace("{…}", "").strip().count(" ") >= (2 if name == "-" else 1) and not _CODE.match(text):
                yield node.lineno, name, text.replace("\n", "\\n")
            if isinstance(node, ast.Constant):
                return
        case ast.Call(ast.Name(called) | ast.Attribute(attr=called)):
            name = called
    for child in ast.iter_child_nodes(node):
        if not isinstance(node, ast.JoinedStr | ast.BinOp) or not isinstance(child, ast.Constant | ast.JoinedStr):
            yield from _texts(child, name)


def _text(value: ast.expr) -> str:
    match value:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
        case ast.FormattedValue() | ast.Name() | ast.Attribute() | ast.Call():
            return "{…}"
        case _:
            return ""


def main() -> None:
    """Print the sentences of rooms."""
    for room in sys.argv[1:] or ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for line, name, text in messages(path):
                print(f"{path.relative_to(ROOT)}:{line}\t{name}\t{text}")


if __name__ == "__main__":
    main()
