"""Write the tables of `docs/reference/settings.md` from the settings that the worker declares.

python -m tools.settings_page
"""

from collections.abc import Iterator
from pathlib import Path

from sluice.worker.config import SETTINGS, Setting

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
BEGIN, END = "<!-- generated -->\n", "<!-- end -->\n"
FLAGS = {"DEVICE": "`--gpu`, `--cpu`", "CALLBACKS_SECRET": "none: `ps` shows flags to every user"}
"""Settings whose flag does not follow from their name."""


def row(setting: Setting) -> str:
    """Format one setting as a row of its section's table."""
    default = "on" if setting.default is True else "" if setting.default is None else f"`{setting.default}`"
    return f"| `{setting.env_name}` | {_flag(setting)} | `{setting.name}` | {default} | {setting.help} |"


def page(text: str) -> str:
    """Return the page with its tables replaced by the current ones."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n".join(_lines()) + "\n" + END + after


def _lines() -> Iterator[str]:
    section = ""
    for setting in SETTINGS:
        if setting.section != section:
            section = setting.section
            yield f"\n## `[{section}]`\n\n| environment | flag | in a file | default | meaning |\n|---|---|---|---|---|"
        yield row(setting)
    yield ""


def _flag(setting: Setting) -> str:
    plain = f"`{setting.flag}`, `--no-{setting.flag[2:]}`" if setting.is_switch else f"`{setting.flag}`"
    return FLAGS.get(setting.env, plain)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
