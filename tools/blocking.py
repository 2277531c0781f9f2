"""Write the blocking twin of each asyncio module: the same code without `async` and `await`.

python -m tools.blocking

Change an asyncio module, then run this. A line that ends with `# asyncio only` has no twin.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TWINS = {
    "producer/aio.py": "producer/client.py",
    "producer/transport/aio.py": "producer/transport/blocking.py",
    "protocol/redis/aio.py": "protocol/redis/blocking.py",
}
"""Each asyncio module, and its twin."""

MARK = "# Generated from {source} by `python -m tools.blocking`: change that file.\n\n"
FIX = ["check", "--fix-only", "--unsafe-fixes", "--select", "C4,F401,I,UP028,UP034"]
OURS = ["--config", "lint.isort.known-first-party=['sluice']"]
"""A twin that is not written yet is ours, too."""

ONLY = re.compile(r"^.*# asyncio only\n", re.MULTILINE)
REPLACEMENTS = [
    (r"await asyncio\.to_thread\(\s*([\w.]+)(,\s*)?", r"\1("),
    (r"await asyncio\.gather\(\*", "list("),
    (r"import asyncio\n", "import time\n"),
    (r"asyncio\.sleep", "time.sleep"),
    (r"async (def|for|with) ", r"\1 "),
    (r"\bawait ", ""),
    (r" \| AsyncIterable\[\w+\]", ""),
    (r"\b(transport|redis)\.aio\b", r"\1.blocking"),
    (r"\b(_?)Async(?=[A-Z])", r"\1"),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\baclosing\b", "closing"),
    (r"\basynccontextmanager\b", "contextmanager"),
]


def twin_of(source: str) -> str:
    """Return the text of the twin of an asyncio module."""
    text = ONLY.sub("", (ROOT / source).read_text())
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    fixed = _ruff([*FIX, *OURS], MARK.format(source=source) + text, source)
    return _ruff(["format"], fixed, source)


def _ruff(command: list[str], text: str, source: str) -> str:
    options = ["--quiet", "--stdin-filename", TWINS[source], "-"]
    ruff = Path(sys.executable).with_name("ruff")
    ran = subprocess.run([ruff, *command, *options], input=text, capture_output=True, text=True, cwd=ROOT, check=True)
    return ran.stdout


def main() -> None:
    """Write all twins."""
    for source, twin in TWINS.items():
        (ROOT / twin).write_text(twin_of(source))


if __name__ == "__main__":
    main()
