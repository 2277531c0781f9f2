"""Write the tables of `docs/reference/settings.md` from the settings that worker and gateway declare.

python -m tools.settings_page
"""

from collections.abc import Iterator
from pathlib import Path

from sluice.gateway import settings as gateway
from sluice.protocol.settings import Setting
from sluice.worker.config import SETTINGS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
BEGIN, END = "<!-- generated -->\n", "<!-- end -->\n"
FLAGS = {"DEVICE": "`--gpu`, `--cpu`", "CALLBACKS_SECRET": "none: `ps` shows flags to every user"}
"""Settings whose flag does not follow from their name."""


def row(setting: Setting) -> str:
    """Format one setting as a row of its section's table."""
    if setting.default in (True, False) and setting.is_switch:
        default = "on" if setting.default else "off"
    else:
        default = f"`{setting.shown_default}`" if setting.shown_default else ""
    return f"| `{setting.env_name}` | {_flag(setting)} | `{setting.name}` | {default} | {setting.help} |"


def page(text: str) -> str:
    """Return the page with its tables replaced by the current ones."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n".join(_lines()) + "\n" + END + after


def _lines() -> Iterator[str]:
    section = ""
    for setting in (*SETTINGS, *gateway.SETTINGS):
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
