"""The documents agree with the code: the loop, error codes, settings, commands, paths, figures, links."""

import ast
import json
import re
from collections.abc import Iterator
from inspect import getsource
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from benchmarks.__main__ import BENCHMARKS
from sluice.engine import errors
from sluice.engine.errors import RequestRejected
from sluice.engine.llm_engine import LLMEngine
from sluice.gateway import settings as gateway
from sluice.producer.cli.main import cli as producer
from sluice.producer.operations.chains import FULL_BLOCKED
from sluice.protocol.calls import FULL
from sluice.protocol.openai_format.bodies import CALLERS_CODES
from sluice.worker.cli import main as worker
from sluice.worker.config import READ_ELSEWHERE, SETTINGS
from sluice.worker.model.translate import code_of
from tests.rules.commands import below, parse
from tools.pictures import iterations
from tools.settings_page import PAGE, page

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
ERRORS = (ROOT / "docs" / "reference" / "errors.md").read_text()
TEST_NAME = re.compile(r"def (test_when_\w+)\(")
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_USERS = [README, *sorted((ROOT / "docs" / "guide").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md"))]
NO_COMMANDS = {"worker broken", "worker COMMAND --help"}
"""Text between backquotes that begins like a command and is none: a log line, a placeholder."""

FOLDERS = "benchmarks|deploy|engine|kernels|migrations|producer|tools|worker"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MAX_PICTURE_BYTES = 40_000
MAX_PROSE = 120
"""Characters of a line outside tables and code."""

SCREEN_COLUMNS, TWO_SCREENS = 110, 100
ABOUT_FAILURES = ("recovery", "durability", "poison-jobs", "topologies", "audit", "fairness")


def loop_of_the_daemon() -> list[str]:
    """The statements of the worker's loop, in order."""
    tree = ast.parse((ROOT / "worker/serve/daemon.py").read_text())
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_loop"]
    (cycle,) = [node for node in loop.body if isinstance(node, ast.While)]
    return [ast.unparse(statement) for statement in cycle.body]


def rows_of(text: str) -> int:
    """The rows that a text takes on a screen."""
    return sum(max(1, -(-len(line) // SCREEN_COLUMNS)) for line in text.splitlines())


def name_of(path: Path) -> str:
    """A page's path, for the test's id."""
    return str(path.relative_to(ROOT))


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def is_broken(document: Path, link: str) -> bool:
    """Whether a link inside the repository leads nowhere."""
    target, _, anchor = link.partition("#")
    path = document.parent / target if target else document
    if "://" in link or not anchor or path.suffix != ".md":
        return "://" not in link and not path.exists()
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return anchor not in map(anchor_of, headings)


def missing_paths(text: str) -> list[str]:
    """The paths between backquotes that are not in the repository; `{a,b}` and `*` stand for one name or more."""
    named = set(re.findall(rf"`((?:{FOLDERS})/[^`\s]*)`", text))
    return [path for path in sorted(named) if not any(ROOT.glob(re.sub(r"\{[^}]*\}", "*", path.rstrip("/"))))]


def unknown_targets(text: str) -> set[str]:
    """The targets of `make` that the Makefile does not have, in prose between backquotes or at a line's begin."""
    return set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE)) - TARGETS


def former_benchmarks() -> set[str]:
    """The names of commands that have left, which pages may quote with their figures: a table of the lab."""
    table = (ROOT / "docs/lab/README.md").read_text().split("| former command |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}


def unknown_benchmarks(text: str) -> set[str]:
    """The names after `python -m benchmarks` that are none of a benchmark."""
    return set(re.findall(r"python -m benchmarks\s+([a-z][a-z-]*)", text)) - set(BENCHMARKS)


def variables_of(command: click.Command) -> set[str]:
    """The environment variables of a command's options and of the commands below it."""
    own = {option.envvar for option in command.params if isinstance(option.envvar, str)}
    return own.union(*map(variables_of, below(command).values()))


def long_lines(text: str) -> Iterator[str]:
    """The lines of prose that are too long: not of tables, code, pictures or what a tool writes."""
    is_code = False
    for line in re.sub(r"<!-- generated -->.*?<!-- end -->", "", text, flags=re.DOTALL).splitlines():
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if len(line) > MAX_PROSE and not (is_code or is_fence or line.lstrip().startswith(("|", "!["))):
            yield line


class TestGivenTheArchitecture:
    def test_when_it_shows_the_loop_then_it_is_the_one_that_runs(self) -> None:
        (shown,) = re.findall(r"while not stopping:\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)

        lines = [line.removeprefix("    ") for line in shown.splitlines() if line.strip()]
        assert lines == [line for statement in loop_of_the_daemon() for line in statement.splitlines()]


class TestGivenThePageOfTheEngine:
    def test_when_it_shows_a_step_then_its_lines_are_those_that_run(self) -> None:
        (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/explanation/engine.md").read_text(), re.DOTALL)

        lines = [line for line in shown.splitlines() if line.strip() != "..."]
        assert [line for line in lines if f"    {line}" not in getsource(LLMEngine.step).splitlines()] == []


class TestGivenTheErrorsPage:
    def test_when_the_engine_rejects_a_request_then_its_code_is_in_the_table(self) -> None:
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestRejected)]

        codes = {code_of(kind("")) for kind in kinds} | CALLERS_CODES

        assert [code for code in sorted(codes) if f"`{code}`" not in ERRORS] == []


class TestGivenTheSettingsPage:
    def test_when_a_setting_is_declared_then_the_page_has_its_names_and_default(self) -> None:
        def cells(text: str) -> list[list[str]]:
            return [line.split(" | ")[:4] for line in text.splitlines() if line.startswith("| `SLUICE_")]

        written = PAGE.read_text()

        assert cells(written) == cells(page(written)), "run `python -m tools.settings_page` to write the page"

    def test_when_it_names_a_flag_then_a_command_has_it(self) -> None:
        commands = (*worker.commands.values(), below(producer)["serve"])
        options = [p for command in commands for p in command.params if isinstance(p, click.Option)]
        known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}

        named = set(re.findall(r"`(--[a-z-]+)`", PAGE.read_text()))

        assert named - known == set()

    def test_when_producer_reads_a_variable_then_the_page_names_it(self) -> None:
        [paragraph] = [text for text in PAGE.read_text().split("\n\n") if text.startswith("`producer` reads")]

        named = re.findall(r"`(SLUICE_\w+)`", paragraph)

        assert sorted(named) == sorted({"SLUICE_STATE_DIR", *variables_of(producer)})


class TestGivenEveryDocument:
    def test_when_it_names_a_setting_then_there_is_one(self) -> None:
        known = {one.env_name for one in (*SETTINGS, *gateway.SETTINGS)} | READ_ELSEWHERE

        named = {name for page in DOCUMENTS for name in re.findall(r"\bSLUICE_[A-Z_]+[A-Z]", page.read_text())}

        assert named - known == set()

    @pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
    def test_when_it_links_to_a_page_or_a_heading_then_it_is_there(self, document: Path) -> None:
        links = re.findall(r"\]\(([^)\s]+)\)", document.read_text())

        assert [link for link in links if is_broken(document, link)] == []

    @pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
    def test_when_it_names_a_test_then_the_file_exists(self, document: Path) -> None:
        named = set(re.findall(r"\btests/[\w/]+\.py\b", document.read_text()))

        assert [name for name in sorted(named) if not (ROOT / name).exists()] == []

    def test_when_it_names_a_test_by_its_function_then_there_is_one(self) -> None:
        defined = {name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST_NAME.findall(path.read_text())}

        named = {name for page in DOCUMENTS for name in re.findall(r"`(test_when_\w+)`", page.read_text())}

        assert named - defined == set()

    @pytest.mark.parametrize("document", FOR_USERS, ids=name_of)
    def test_when_it_names_a_command_then_its_options_are_known(self, document: Path) -> None:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        named = {" ".join(span.split()) for span in re.findall(r"`((?:worker|producer)\s[^`]+)`", text)} - NO_COMMANDS

        for command in named:
            parse(command)

    @pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
    def test_when_it_names_a_path_then_the_path_exists(self, document: Path) -> None:
        assert missing_paths(document.read_text()) == []

    # The changelog names what was removed.
    @pytest.mark.parametrize("document", [one for one in DOCUMENTS if one.name != "CHANGELOG.md"], ids=name_of)
    def test_when_it_names_a_target_or_a_benchmark_then_there_is_one(self, document: Path) -> None:
        text, former = document.read_text(), set[str]() if document in FOR_USERS else former_benchmarks()

        assert unknown_targets(text) | (unknown_benchmarks(text) - former) == set()

    @pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
    def test_when_its_prose_is_measured_then_lines_are_short(self, document: Path) -> None:
        assert list(long_lines(document.read_text())) == []


class TestGivenThePageOfTheLab:
    def test_when_a_benchmark_is_registered_then_the_lab_lists_it(self) -> None:
        table = (ROOT / "docs/lab/README.md").read_text().split("## Commands")[1].split("## Former commands")[0]

        listed = re.findall(r"^\| `python -m benchmarks ([a-z-]+)` \|", table, re.MULTILINE)

        assert sorted(listed) == sorted(BENCHMARKS)
        assert former_benchmarks() & set(BENCHMARKS) == set()


class TestGivenThePageOfTheGateway:
    def test_when_a_queue_may_be_full_then_the_gateways_page_has_each_code(self) -> None:
        page = (ROOT / "docs/guide/http.md").read_text()

        assert [code for code in (*FULL, FULL_BLOCKED) if f"`{code}`" not in page] == []


class TestGivenThePagesAboutFailures:
    @pytest.mark.parametrize("name", ABOUT_FAILURES)
    def test_when_one_is_shown_then_it_fits_two_screens(self, name: str) -> None:
        assert rows_of((ROOT / "docs/explanation" / f"{name}.md").read_text()) <= TWO_SCREENS


class TestGivenEverySource:
    def test_when_it_names_a_page_then_the_page_exists(self) -> None:
        folders = (
            "engine",
            "gateway",
            "history",
            "kernels",
            "migrations",
            "producer",
            "protocol",
            "worker",
            "benchmarks",
            "tests",
            "tools",
        )
        sources = [path for folder in folders for kind in ("*.py", "*.lua") for path in (ROOT / folder).rglob(kind)]

        named = {page for path in sources for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text())}

        assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


class TestGivenThePictures:
    def test_when_the_readme_has_a_table_of_engines_then_the_chart_has_its_figures(self) -> None:
        data = json.loads((ROOT / "docs/images/compared-engines.json").read_text())
        table = README.read_text().split("| sequences at once |")[1].split("\n\n")[0].replace("*", "")
        cells = [[cell.strip() for cell in line.split("|")[2:6]] for line in table.splitlines()[2:]]
        rows = [[int(cell) if cell.isdigit() else None for cell in row] for row in cells]

        chart = (ROOT / "docs/images/compared-engines.svg").read_text()

        assert rows == [row["tokens_per_s"] for row in data["rows"]]
        assert [f for row in rows for f in row if f is not None and f">{f}</text>" not in chart] == []

    @pytest.mark.parametrize("name", ["demo.svg", "compared-engines.svg"])
    def test_when_a_picture_is_read_then_it_is_small_and_has_text(self, name: str) -> None:
        picture = (ROOT / "docs" / "images" / name).read_text()

        words = "".join(ElementTree.fromstring(picture).itertext())

        assert len(picture.encode()) < MAX_PICTURE_BYTES
        assert "Sluice" in words or "every token received once, in order" in words

    def test_when_the_iterations_are_run_again_then_the_picture_and_the_page_show_them(self) -> None:
        seen = iterations.iterations()
        page = (ROOT / "docs/explanation/engine.md").read_text()

        assert iterations.PICTURE.read_text() == iterations.draw(seen), "run `python -m tools.pictures.iterations`"
        assert [one.number for one in seen if one.preempted and str(one) in page] == [12]


class TestGivenATextWithMistakes:
    """So that the tests above can fail."""

    def test_when_a_path_is_missing_then_it_is_found(self) -> None:
        text = "`worker/cli.py`, `worker/{serve,jobs}`, `engine/no_such.py`, `kernels/no_such/`"

        assert missing_paths(text) == ["engine/no_such.py", "kernels/no_such/"]

    def test_when_a_target_or_a_benchmark_is_unknown_then_it_is_found(self) -> None:
        text = (
            "`make test` and `make tset`\nmake chekc  # all\n`python -m benchmarks\nqueue`, `python -m benchmarks quue`"
        )

        assert unknown_targets(text) == {"tset", "chekc"}
        assert unknown_benchmarks(text) == {"quue"}

    def test_when_its_rows_are_counted_then_a_long_line_takes_several(self) -> None:
        assert rows_of(f"# short\n\n{'x' * 110}\n{'x' * 111}") == 5

    def test_when_a_line_is_long_then_only_prose_counts(self) -> None:
        long = "word " * 30

        assert list(long_lines(f"short\n{long}\n| {long} |\n```\n{long}\n```\n- {long}")) == [long, f"- {long}"]


class TestGivenTheTemplatesOfThePage:
    def test_when_one_names_a_command_then_its_options_are_known(self) -> None:
        folder = ROOT / "gateway/ui/templates"
        text = "".join(path.read_text() for path in sorted(folder.rglob("*.html")))

        named = {
            re.sub(r"\{\{.*?\}\}", "name", one) for one in re.findall(r"<code>((?:worker|producer) .*?)</code>", text)
        }

        assert len(named) > 5
        for command in sorted(named):
            parse(command)


class TestGivenACommandThatThereIsNot:
    """So that the tests above can fail."""

    @pytest.mark.parametrize("command", ["worker start --modle x", "producer jobs shwo", "producer submit --wiat f"])
    def test_when_it_is_parsed_then_it_is_a_misuse(self, command: str) -> None:
        with pytest.raises(click.UsageError):
            parse(command)
