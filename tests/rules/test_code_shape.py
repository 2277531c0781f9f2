"""Rules that no linter checks: length of functions, docstrings of modules, imports of a fresh interpreter."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("engine", "gateway", "history", "kernels", "migrations", "producer", "protocol", "worker")
MAX_FUNCTION_LINES = 40
MAX_LINE = 120
VERBS = frozenset({
    "Answers", "Builds", "Calls", "Captures", "Checks", "Closes", "Computes", "Converts", "Copies", "Decides",
    "Decodes", "Detects", "Draws", "Encodes", "Executes", "Finds", "Follows", "Gives", "Groups", "Handles", "Holds",
    "Is", "Keeps", "Lays", "Listens", "Looks", "Makes", "Maps", "Moves", "Opens", "Parses", "Pulls", "Reads",
    "Receives", "Replaces", "Runs", "Samples", "Sends", "Serves", "Sets", "Starts", "Stops", "Takes", "Waits", "Wakes",
    "Watches", "Writes", "Draw", "Pack", "Read", "Return", "Run", "Send", "Take", "Turn",
})  # fmt: skip
"""First words of docstrings that say what a class does. Those of a class say what it is, as a noun phrase. Words that
are plural nouns too, such as `Counts`, `Results` or `Times`, are not here."""

# Imported in this order in one interpreter: a later module may need more than an earlier one.
OF_PRODUCER_AND_WORKER = [
    (
        "sluice.producer.client, sluice.producer.aio, sluice.producer.cli.main",
        ("torch", "transformers", "rq", "alembic", "triton"),
    ),
    ("sluice.worker.offline.sampling", ("torch", "transformers", "rq", "numpy", "jinja2")),
    ("sluice.worker.cli, sluice.worker.offline.llm", ("torch", "transformers", "rq")),
    ("sluice.worker.recorder.recorder", ("torch", "transformers")),
    ("sluice.worker.callbacks.command", ("torch", "transformers")),
]
OF_THE_COMMANDS = [
    (
        ", ".join(
            f"sluice.{name}"
            for name in (
                *(f"producer.cli.{name}" for name in ("main", "bulk", "control", "follow", "history", "queues")),
                *(f"gateway.cli.{name}" for name in ("keys", "prices", "serve")),
            )
        ),
        (
            "torch",
            "numpy",
            "sqlalchemy",
            "alembic",
            "rich",
            "opentelemetry",
            "structlog",
            "starlette",
            "uvicorn",
            "jinja2",
        ),
    ),
    # What `worker start` imports before the model, after the group of its commands has run.
    (
        "sluice.worker.cli; sluice.worker.cli.main.callback(); import sluice.worker.serve.start",
        ("torch", "numpy", "sqlalchemy", "alembic", "rich", "opentelemetry", "rq"),
    ),
]
"""What makes a command start slowly, and is imported by those that use it."""

OF_THE_ENGINE = [
    ("sluice.kernels.native", ("torch", "numpy")),
    ("sluice.engine.llm_engine, sluice.engine.null_model", ("torch", "transformers", "redis", "sqlalchemy")),
    ("sluice.engine.execution.start.model_loading", ("transformers", "triton", "redis", "sqlalchemy")),
]


def _modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    """Each module is parsed once for all rules."""
    return ast.parse(path.read_text())


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _is_exempt(path: Path) -> bool:
    """A kernel is one function by nature; a migration is a list of columns."""
    names = {
        "paged_attention": {"decode.py", "hopper.py", "invariant.py", "prefill.py", "short_chunks.py", "tile.py"},
        "linear": {
            *("few_rows.py", "invariant.py", "float8_row.py", "float8_tiles.py"),
            *("word_codes.py", "word_row.py", "word_tiles.py"),
        },
        "sample": {"candidates.py", "cut.py", "draw.py", "row.py", "whole_row.py"},
    }
    return path.name in names.get(path.parent.name, set()) | {"kernel.py"} or path.parent.name == "versions"


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, the docstring not counted."""
    body = function.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        body = body[1:]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


class TestGivenEveryModule:
    @pytest.mark.parametrize("path", _modules(), ids=_name)
    def test_when_it_is_read_then_it_says_what_it_is(self, path: Path) -> None:
        tree = _tree(path)

        assert ast.get_docstring(tree) is not None or not tree.body

    @pytest.mark.parametrize("path", [p for p in _modules() if not _is_exempt(p)], ids=_name)
    def test_when_its_functions_are_measured_then_each_fits_a_screen(self, path: Path) -> None:
        long = {f.name: _code_lines(f) for f in _functions(_tree(path))}

        assert {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES} == {}

    @pytest.mark.parametrize("path", _modules(), ids=_name)
    def test_when_its_classes_are_read_then_each_says_what_it_is(self, path: Path) -> None:
        first_lines = {one.name: ast.get_docstring(one) or "" for one in _classes(_tree(path))}

        found = {name: line for name, line in first_lines.items() if not line or line.split()[0] in VERBS}

        assert found == {}


def _writes(path: Path, fields: set[str]) -> Iterator[str]:
    """Statements of a module that write one of these fields, or an element of it, of another object than `self`."""
    for node in ast.walk(_tree(path)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in (part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])):
            field = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(field, ast.Attribute) and field.attr in fields:
                owner = ast.unparse(field.value)
                if owner.split(".")[-1] not in ("self", "counters"):
                    yield f"{_name(path)}: {ast.unparse(node)}"


class TestGivenTheFieldsOfASequence:
    def test_when_the_scheduler_and_drafts_are_read_then_only_its_own_module_writes_them(self) -> None:
        [sequence] = [
            one for one in _classes(ast.parse((ROOT / "engine/sequence.py").read_text())) if one.name == "Sequence"
        ]
        annotated = [node.target for node in sequence.body if isinstance(node, ast.AnnAssign)]
        fields = {target.id for target in annotated if isinstance(target, ast.Name)}

        importing = [
            path for path in (ROOT / "engine").rglob("*.py") if "from sluice.engine.sequence import" in path.read_text()
        ]

        assert len(fields) > 20
        assert [write for path in sorted(importing) for write in _writes(path, fields)] == []


class TestGivenAFreshInterpreter:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "imports",
        [OF_PRODUCER_AND_WORKER, OF_THE_COMMANDS, OF_THE_ENGINE],
        ids=["producer and worker", "commands", "engine"],
    )
    def test_when_a_module_is_imported_then_what_it_must_not_need_stays_out(
        self, imports: list[tuple[str, tuple[str, ...]]]
    ) -> None:
        code = "import sys\n" + "".join(
            f"import {modules}\nprint([m for m in {absent!r} if m in sys.modules])\n" for modules, absent in imports
        )

        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

        assert (done.returncode, done.stdout.split()) == (0, ["[]"] * len(imports)), done.stderr

    @pytest.mark.long
    def test_when_transformers_probes_for_a_kernels_package_then_ours_does_no_harm(self) -> None:
        code = "import kernels; from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)"

        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

        assert (done.returncode, done.stdout.strip()) == (0, "LlamaForCausalLM"), done.stderr


class TestGivenTheScripts:
    @pytest.mark.parametrize("path", sorted((ROOT / "protocol/scripts").glob("*.lua")), ids=_name)
    def test_when_a_script_is_read_then_it_begins_with_what_it_does(self, path: Path) -> None:
        assert path.read_text().startswith("--")

    @pytest.mark.parametrize("path", sorted((ROOT / "protocol/scripts").glob("*.lua")), ids=_name)
    def test_when_its_lines_are_measured_then_none_is_too_long(self, path: Path) -> None:
        assert [line for line in path.read_text().splitlines() if len(line) > MAX_LINE] == []
