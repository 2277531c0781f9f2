"""Settings of a program, each declared once: a field of a dataclass, with its default, names, unit and help.

They are read from a TOML file, the environment and flags; a later source wins, and all problems are reported at once.
Worker and gateway declare their own settings. Neither file nor environment is read elsewhere.
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
"""Prefix, in the environment, of settings that only the gateway has. Flags and files omit it."""

CONFIG_FILE_NAME = "SLUICE_CONFIG"
"""Environment name of the TOML file's path."""

TIME = "TIME"
"""The metavar of seconds that may have a unit: 90d, 12h, 30m, 45s or 45."""

UNITS = {"s": "SECONDS", "mib": "MIB", "tokens": "TOKENS", "days": "DAYS"}
"""Metavars by the unit at the end of a setting's name."""

UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_TIME_S = 100 * 366 * UNITS_S["d"]


def setting(default: T, *, env: str = "", metavar: str = "", help: str, secret: bool = False) -> T:
    """Declare a setting.

    Args:
        default: The value if no source gives one.
        env: The name in the environment (SLUICE_<env>) and, in lower case, on the command line. Default: the field's.
        metavar: The name of the value in the help. Default: the unit at the end of the field's name.
        help: The meaning, as a sentence.
        secret: Whether to omit the value from `repr`.
    """
    return field(default=default, repr=not secret, metadata={"env": env, "metavar": metavar, "help": help})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, with its names in flags, files and the environment."""

    section: str
    name: str
    kind: Any  # the field's annotation: a type, a union or a Literal, which have no common static type
    default: object
    env: str
    metavar: str
    help: str

    @property
    def key(self) -> str:
        """The name in the TOML file: `section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def env_name(self) -> str:
        """The name in the environment."""
        return PREFIX + self.env

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.env.removeprefix(GATEWAY).lower().removesuffix("_s").replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; empty for other kinds."""
        plain = _without_none(self.kind)
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def is_switch(self) -> bool:
        """Whether the setting is a boolean."""
        return _without_none(self.kind) is bool

    @property
    def is_list(self) -> bool:
        """Whether the setting has several values: a repeated flag, words in the environment."""
        return get_origin(self.kind) is tuple

    @property
    def shown_default(self) -> str:
        """The default as text for the help; empty if there is none."""
        if self.default is None or self.is_switch:
            return ""
        if self.is_list:
            return " ".join(cast("tuple[str, ...]", self.default))
        return f"{self.default:g}s" if self.metavar == TIME else str(self.default)


def _without_none(kind: Any) -> Any:  # noqa: ANN401  # annotations, as in `Setting.kind`
    if get_origin(kind) in (Union, types.UnionType):
        return next(arm for arm in get_args(kind) if arm is not type(None))
    return kind


def settings_of(section: str, kind: Any) -> Iterator[Setting]:  # noqa: ANN401  # dataclasses have no common base
    """Yield the settings that a dataclass declares."""
    hints = get_type_hints(kind)
    for declared in dataclasses.fields(kind):
        if about := declared.metadata:
            metavar = about["metavar"] or UNITS.get(declared.name.rpartition("_")[2], "")
            env = about["env"] or declared.name.upper()
            yield Setting(section, declared.name, hints[declared.name], declared.default, env, metavar, about["help"])


@dataclass(slots=True, eq=False)
class GivenSettings:
    """The values from the sources, by `section.name`. Changes while they are read."""

    values: dict[str, object] = field(default_factory=dict[str, object])
    names: dict[str, str] = field(default_factory=dict[str, str])
    """The name of each setting in its source."""

    problems: list[str] = field(default_factory=list[str])
    unread: set[str] = field(default_factory=set[str])
    """Sections with a value that cannot be converted."""

    def of(self, section: str) -> dict[str, Any]:  # Any: of the types that the fields declare
        """Return the values of a section, by name."""
        return {key.partition(".")[2]: value for key, value in self.values.items() if key.startswith(f"{section}.")}


Entries = Iterator[tuple[Setting, object, str]]
"""(setting, value, name of the setting in the source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The settings of one program, which shares file and environment with other programs."""

    settings: tuple[Setting, ...]
    is_ours: Callable[[str], bool]
    """Whether a name in the environment belongs to this program, so that an unknown one is an error."""

    hint: str
    """Reference to the list of settings, for errors."""

    other_sections: Collection[str] | None
    """Sections of the file that other programs read; None: all unknown sections."""

    def read(
        self,
        environ: Mapping[str, str],
        *,
        file: Path | None = None,
        flags: Mapping[str, object] | None = None,
        named: Callable[[Setting], str] = attrgetter("flag"),
    ) -> GivenSettings:
        """Read all sources. `flags` maps `section.name` to a value; `named` returns a flag's name for problems."""
        given = GivenSettings()
        path = file or (Path(environ[CONFIG_FILE_NAME]) if environ.get(CONFIG_FILE_NAME) else None)
        by_key = {setting.key: setting for setting in self.settings}
        in_flags = ((by_key[key], value, named(by_key[key])) for key, value in (flags or {}).items())
        for source in (self._in_file(path, given.problems), self._in_environment(environ, given.problems), in_flags):
            for setting, value, name in source:
                given.names[setting.key] = name
                try:
                    given.values[setting.key] = _read(setting, value)
                except ValueError as error:
                    given.problems.append(f"{name}: {error}")
                    given.unread.add(setting.section)
        return given

    def _in_file(self, path: Path | None, problems: list[str]) -> Entries:
        by_key = {setting.key: setting for setting in self.settings}
        for key, value in _file_values(path, problems) if path else ():
            if key in by_key:
                yield by_key[key], value, f"{path}: {key}"
            elif not self._is_others(key.partition(".")[0]):
                problems.append(f"{path}: {key}: unknown setting")

    def _is_others(self, section: str) -> bool:
        if self.other_sections is None:
            return all(setting.section != section for setting in self.settings)
        return section in self.other_sections

    def _in_environment(self, environ: Mapping[str, str], problems: list[str]) -> Entries:
        by_env_name = {setting.env_name: setting for setting in self.settings}
        for name in sorted(name for name in environ if not is_service_link(name, environ[name])):
            if name in by_env_name:
                yield by_env_name[name], environ[name], name
            elif name.startswith(PREFIX) and self.is_ours(name):
                problems.append(f"{name}: unknown setting; {self.hint}")


def _file_values(path: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    # Imported here, because the client's commands import this module but read no file.
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


def _none_if_empty(_context: click.Context, _parameter: click.Parameter, value: object) -> object:
    return None if value == () else value


def flag_of(setting: Setting, parameter: str) -> Callable[[FC], FC]:
    """Return the command-line option of a setting. Its value is text, which `Declared.read` converts."""
    shown = "".join(f"; default: {text}" for text in [setting.shown_default] if text)
    names = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.is_switch else setting.flag
    return click.option(
        names,
        parameter,
        metavar=setting.metavar or None,
        multiple=setting.is_list,
        default=None,
        # A repeated flag that is not given is an empty tuple, which would hide the other sources.
        callback=_none_if_empty,
        help=f"{setting.help}  [env var: {setting.env_name}{shown}]",
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


def _read(setting: Setting, value: object) -> object:
    """Convert a value from a source to the setting's type.

    Raises:
        ValueError: it cannot be converted. The message does not name the setting.
    """
    if setting.choices:
        return _one_of(setting.choices, value)
    if setting.is_list:
        return _words(value)
    kind = _without_none(setting.kind)
    if kind is bool:
        return _switch(value)
    if kind is str:
        return _text(value)
    return seconds(value) if setting.metavar == TIME else _number(kind, value, setting.metavar.lower())


def _one_of(choices: tuple[str, ...], value: object) -> object:
    if value in choices:
        return value
    raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}")


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(map(_text, cast("Sequence[object]", value)))
    return tuple(_text(value).split())


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCH:
        return _SWITCH[value.lower()]
    raise ValueError(f"expected true or false, got {value!r}")


def _text(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"expected text, got {value!r}")


def _number(kind: type[int] | type[float], value: object, unit: str) -> int | float:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = kind(value)
        except ValueError:
            number = None
        if number is not None and number == number and (isinstance(value, str) or number == value):
            return number
    raise ValueError(f"expected {unit} as a {'whole ' if kind is int else ''}number, got {value!r}")


def seconds(value: object) -> float:
    """Return the seconds of a time such as 90d, 12h, 30m, 45s or 45.

    Raises:
        ValueError: it is not a time, or over a century.
    """
    match = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,9})?)([smhd]?)", str(value))
    number = float(match[1]) * UNITS_S[match[2]] if match else MAX_TIME_S + 1
    if number > MAX_TIME_S:
        raise ValueError(f"expected a time such as 90d, 12h, 30m, 45s or 45, got {value!r}")
    return number
