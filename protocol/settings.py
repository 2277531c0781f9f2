"""Settings of a program, each declared once: a field of a dataclass, with its default, names, unit and help.

They are read from a TOML file, the environment and flags; a later source wins, and every problem is reported at once.
This knows no setting: worker and gateway declare their own. Neither file nor environment is read elsewhere.
"""

import dataclasses
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import click

from sluice.protocol.host.service_links import is_service_link

T = TypeVar("T")
FC = TypeVar("FC", bound=Callable[..., Any])  # Any: as click has it

PREFIX = "SLUICE_"
GATEWAY = "GATEWAY_"
"""Begins the names of settings that only the gateway has, in the environment. Flags and files leave it out."""

CONFIG_FILE_NAME = "SLUICE_CONFIG"
"""Environment name of the TOML file's path."""

TIME = "TIME"
"""The metavar of seconds that may have a unit: 90d, 12h, 30m, 45s or 45."""

UNITS = {"s": "SECONDS", "mib": "MIB", "tokens": "TOKENS", "days": "DAYS"}
"""The metavars of the units that end names."""

UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_TIME_S = 100 * 366 * UNITS_S["d"]


def setting(default: T, *, env: str = "", metavar: str = "", help: str, secret: bool = False) -> T:
    """Declare a setting.

    Args:
        default: Its value if no source gives one.
        env: Its name in the environment (SLUICE_<env>) and, in lower case, on the command line. Default: the field's.
        metavar: Names its value in the help. Default: the unit that ends the field's name.
        help: What it sets, as a sentence.
        secret: Whether to leave it out of every `repr`.
    """
    return field(default=default, repr=not secret, metadata={"env": env, "metavar": metavar, "help": help})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as flags, files and the environment name it."""

    section: str
    name: str
    kind: Any  # the field's annotation: a type, a union or a Literal, which have no common static type
    default: object
    env: str
    metavar: str
    help: str

    @property
    def key(self) -> str:
        """Its name in the TOML file: `section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def env_name(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.env

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.env.removeprefix(GATEWAY).lower().removesuffix("_s").replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; empty for other kinds."""
        plain = _without_none(self.kind)
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def is_switch(self) -> bool:
        """Whether its values are true and false."""
        return _without_none(self.kind) is bool

    @property
    def is_list(self) -> bool:
        """Whether it has several values: a flag that is repeated, words in the environment."""
        return get_origin(self.kind) is tuple

    @property
    def shown_default(self) -> str:
        """The default for people; empty without one."""
        if self.default is None or self.is_switch or self.is_list:
            return ""
        return f"{self.default:g}s" if self.metavar == TIME else str(self.default)


def _without_none(kind: Any) -> Any:  # noqa: ANN401  # annotations, as in `Setting.kind`
    if get_origin(kind) in (Union, types.UnionType):
        return next(arm for arm in get_args(kind) if arm is not type(None))
    return kind


def settings_of(section: str, kind: Any) -> Iterator[Setting]:  # noqa: ANN401  # dataclasses have no common base
    """Yield the settings that a dataclass declares."""
    hints = get_type_hints(kind)
    for one in dataclasses.fields(kind):
        if about := one.metadata:
            metavar = about["metavar"] or UNITS.get(one.name.rpartition("_")[2], "")
            env = about["env"] or one.name.upper()
            yield Setting(section, one.name, hints[one.name], one.default, env, metavar, about["help"])


@dataclass(slots=True, eq=False)
class GivenSettings:
    """What the sources give, by `section.name`. Changes while they are read."""

    values: dict[str, object] = field(default_factory=dict[str, object])
    names: dict[str, str] = field(default_factory=dict[str, str])
    """How each was named where it was given."""

    problems: list[str] = field(default_factory=list[str])
    unread: set[str] = field(default_factory=set[str])
    """Sections with a value that cannot be converted."""

    def of(self, section: str) -> dict[str, Any]:  # Any: of the types that the fields declare
        """Return the values of a section by name."""
        return {key.partition(".")[2]: value for key, value in self.values.items() if key.startswith(f"{section}.")}


Entries = Iterator[tuple[Setting, object, str]]
"""(setting, given value, name under which it was given)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The settings of one program, and what of a shared file or environment is another's."""

    settings: tuple[Setting, ...]
    is_ours: Callable[[str], bool]
    """Whether a name in the environment would be this program's: if it is not known, it is an error."""

    hint: str
    """Where the settings are listed."""

    other_sections: Collection[str] | None
    """Sections of a file that other programs read; None: all that are not known."""

    def read(
        self,
        environ: Mapping[str, str],
        *,
        file: Path | None = None,
        flags: Mapping[str, object] | None = None,
        named: Callable[[Setting], str] = attrgetter("flag"),
    ) -> GivenSettings:
        """Read all sources. `flags` maps `section.name` to a value; problems name such a setting as `named` does."""
        given = GivenSettings()
        path = file or (Path(environ[CONFIG_FILE_NAME]) if environ.get(CONFIG_FILE_NAME) else None)
        known = {one.key: one for one in self.settings}
        in_flags = ((known[key], value, named(known[key])) for key, value in (flags or {}).items())
        for source in (self._in_file(path, given.problems), self._in_environment(environ, given.problems), in_flags):
            for one, value, name in source:
                given.names[one.key] = name
                try:
                    given.values[one.key] = _read(one, value)
                except ValueError as error:
                    given.problems.append(f"{name}: {error}")
                    given.unread.add(one.section)
        return given

    def _in_file(self, path: Path | None, problems: list[str]) -> Entries:
        known = {one.key: one for one in self.settings}
        for key, value in _file_values(path, problems) if path else ():
            if key in known:
                yield known[key], value, f"{path}: {key}"
            elif not self._is_others(key.partition(".")[0]):
                problems.append(f"{path}: {key}: unknown setting")

    def _is_others(self, section: str) -> bool:
        if self.other_sections is None:
            return all(one.section != section for one in self.settings)
        return section in self.other_sections

    def _in_environment(self, environ: Mapping[str, str], problems: list[str]) -> Entries:
        known = {one.env_name: one for one in self.settings}
        for name in sorted(name for name in environ if not is_service_link(name, environ[name])):
            if name in known:
                yield known[name], environ[name], name
            elif name.startswith(PREFIX) and self.is_ours(name):
                problems.append(f"{name}: unknown setting; {self.hint}")


def _file_values(path: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    # Imported here because the client's commands import this module, and read no file.
    import tomllib

    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return
    for section, table in tables.items():
        if isinstance(table, dict):
            yield from ((f"{section}.{name}", value) for name, value in cast("dict[str, object]", table).items())
        else:
            yield section, table


# ---------------------------------------------------------------- flags


def flag_of(one: Setting, parameter: str) -> Callable[[FC], FC]:
    """Return the option of a command for a setting. Its value is text: `Declared.read` converts it, and reports all."""
    shown = "".join(f"; default: {text}" for text in [one.shown_default] if text)
    names = f"{one.flag}/--no-{one.flag[2:]}" if one.is_switch else one.flag
    return click.option(
        names,
        parameter,
        metavar=one.metavar or None,
        multiple=one.is_list,
        default=None,
        help=f"{one.help}  [env var: {one.env_name}{shown}]",
    )


def config_option(section: str) -> Callable[[FC], FC]:
    """Return the option for the file with settings."""
    return click.option(
        "--config",
        "config_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        envvar=CONFIG_FILE_NAME,
        show_envvar=True,
        help=f"TOML file with the same settings, as `[{section}]` and `name = value`.",
    )


# ---------------------------------------------------------------- values

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _read(one: Setting, given: object) -> object:
    """Convert a given value to the setting's type.

    Raises:
        ValueError: it cannot be converted. The message does not name the setting.
    """
    if one.choices:
        return _one_of(one.choices, given)
    if one.is_list:
        return _words(given)
    kind = _without_none(one.kind)
    if kind is bool:
        return _switch(given)
    if kind is str:
        return _text(given)
    return seconds(given) if one.metavar == TIME else _number(kind, given, one.metavar.lower())


def _one_of(choices: tuple[str, ...], given: object) -> object:
    if given in choices:
        return given
    raise ValueError(f"expected one of {', '.join(choices)}, got {given!r}")


def _words(given: object) -> tuple[str, ...]:
    if isinstance(given, list | tuple):
        return tuple(map(_text, cast("Sequence[object]", given)))
    return tuple(_text(given).split())


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in _SWITCH:
        return _SWITCH[given.lower()]
    raise ValueError(f"expected true or false, got {given!r}")


def _text(given: object) -> str:
    if isinstance(given, str) and given:
        return given
    raise ValueError(f"expected text, got {given!r}")


def _number(kind: type[int] | type[float], given: object, unit: str) -> int | float:
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        try:
            number = kind(given)
        except ValueError:
            number = None
        if number is not None and number == number and (isinstance(given, str) or number == given):
            return number
    raise ValueError(f"expected {unit} as a {'whole ' if kind is int else ''}number, got {given!r}")


def seconds(given: object) -> float:
    """Return the seconds of a time such as 90d, 12h, 30m, 45s or 45.

    Raises:
        ValueError: it is none, or over a century.
    """
    found = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,9})?)([smhd]?)", str(given))
    number = float(found[1]) * UNITS_S[found[2]] if found else MAX_TIME_S + 1
    if number > MAX_TIME_S:
        raise ValueError(f"expected a time such as 90d, 12h, 30m, 45s or 45, got {given!r}")
    return number
