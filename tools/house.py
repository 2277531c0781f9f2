"""Print figures about the house: its deepest import chain, small files, names with two meanings, lines of each room.

python -m tools.house [--chain] [--names]

Lines are those that are not blank, without generated files. Nothing enforces these figures, and no file is joined or
split to move one.
"""

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
ROOMS = tuple(sorted(path.name for path in (ROOT / "sluice").iterdir() if path.is_dir() and path.is_symlink()))
SMALL = 60
GENERATED = "# Generated from "
LANGUAGES = {
    ".py": "Python", ".lua": "Lua", ".c": "C", ".h": "C", ".html": "page", ".css": "page", ".js": "page",
}  # fmt: skip


def files(room: str) -> list[Path]:
    """Return the sources of a room that are ours, in all languages."""
    return sorted(
        path
        for path in (ROOT / room).rglob("*")
        if path.suffix in LANGUAGES
        and path.is_file()
        and not {"vendor", "__pycache__"} & set(path.parts)
        and not path.read_text().startswith(GENERATED)
    )


def num_lines(path: Path) -> int:
    """Count the lines of a file that are not blank."""
    return sum(not line.isspace() for line in path.read_text().splitlines(keepends=True))


def deepest_chain(graph: grimp.ImportGraph) -> list[str]:
    """Return the longest chain of modules of which each imports the next. Imports must have no cycle."""
    longest: dict[str, list[str]] = {}

    def chain(module: str) -> list[str]:
        if module not in longest:
            longest[module] = []
            below = (chain(imported) for imported in sorted(graph.find_modules_directly_imported_by(module)))
            longest[module] = [module, *max(below, key=len, default=[])]
        return longest[module]

    return max((chain(module) for module in sorted(graph.modules)), key=len)


def public_classes(room: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and file of each public class at the top level of a module."""
    for path in files(room):
        if path.suffix == ".py":
            yield from ((one.name, path) for one in ast.parse(path.read_text()).body if _is_public_class(one))


def _is_public_class(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and not node.name.startswith("_")


def print_rooms() -> None:
    """Print the lines of each room by language."""
    columns = list(dict.fromkeys(LANGUAGES.values()))
    print(f"{'lines':<12}" + "".join(f"{name:>9}" for name in (*columns, "all")))
    total: Counter[str] = Counter()
    for room in ROOMS:
        lines: Counter[str] = Counter()
        for path in files(room):
            lines[LANGUAGES[path.suffix]] += num_lines(path)
        total += lines
        print(f"{room:<12}" + "".join(f"{lines[name]:>9,}" for name in columns) + f"{lines.total():>9,}")
    print(f"{'all':<12}" + "".join(f"{total[name]:>9,}" for name in columns) + f"{total.total():>9,}\n")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chain", action="store_true", help="print the modules of the deepest import chain")
    parser.add_argument("--names", action="store_true", help="print where the names that exist twice are defined")
    asked = parser.parse_args()
    print_rooms()

    lengths = [len(path.read_text().splitlines()) for room in ROOMS for path in files(room) if path.suffix == ".py"]
    num_modules, num_small = sum(length > 0 for length in lengths), sum(0 < length < SMALL for length in lengths)
    print(f"modules under {SMALL} lines in all: {num_small} of {num_modules} ({num_small / num_modules:.0%})")

    chain = deepest_chain(grimp.build_graph("sluice", cache_dir=None, exclude_type_checking_imports=True))
    print(f"deepest import chain: {len(chain)} modules")
    if asked.chain:
        print("".join(f"  {module}\n" for module in chain), end="")

    named: defaultdict[str, list[Path]] = defaultdict(list)
    for name, path in (found for room in ROOMS for found in public_classes(room)):
        named[name].append(path)
    twice = {name: paths for name, paths in sorted(named.items()) if len(paths) > 1}
    print(f"public class names defined more than once: {len(twice)} ({', '.join(twice)})")
    if asked.names:
        print(
            "".join(f"  {name}: {path.relative_to(ROOT)}\n" for name, paths in twice.items() for path in paths), end=""
        )


if __name__ == "__main__":
    main()
