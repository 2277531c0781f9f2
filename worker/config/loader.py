"""Build the configuration from defaults, a TOML file, the environment and flags; a later source wins.

This is the only module of the worker that reads the environment, from a mapping that it is given. It reports every
problem at once.
"""

import dataclasses
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sluice.worker.config.schema import WorkerConfig
from sluice.worker.config.service_links import is_service_link
from sluice.worker.errors import ConfigError

PREFIX = "SLUICE_"
CONFIG_FILE_NAME = "SLUICE_CONFIG"
"""Environment name of the TOML file's path."""

READ_ELSEWHERE = frozenset({CONFIG_FILE_NAME, "SLUICE_STATE_DIR", "SLUICE_API_KEY"})
"""Names with the prefix that others read, such as the gateway's clients; they are not errors here."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the tree, as flags, files and the environment name it."""

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
        return "--" + self.env.lower().removesuffix("_s").replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal; empty for other kinds."""
        plain = _without_none(self.kind)
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def is_switch(self) -> bool:
        """Whether its values are true and false."""
        return _without_none(self.kind) is bool


def _without_none(kind: Any) -> Any:  # noqa: ANN401  # annotations, as in `Setting.kind`
    if get_origin(kind) in (Union, types.UnionType):
        return next(arm for arm in get_args(kind) if arm is not type(None))
    return kind


def _sections() -> dict[str, Any]:  # the sections are dataclasses without a common base
    return get_type_hints(WorkerConfig)


def _settings_of(section: str, kind: Any) -> Iterator[Setting]:  # noqa: ANN401  # as in `_sections`
    hints = get_type_hints(kind)
    for leaf in dataclasses.fields(kind):
        meta = leaf.metadata
        yield Setting(section, leaf.name, hints[leaf.name], leaf.default, meta["env"], meta["metavar"], meta["help"])


SETTINGS: tuple[Setting, ...] = tuple(
    leaf for section, kind in _sections().items() for leaf in _settings_of(section, kind)
)


def load_config(
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    named: Callable[[Setting], str] = attrgetter("flag"),
) -> WorkerConfig:
    """Build the configuration. `flags` maps `section.name` to a value; problems name such a setting as `named` does.

    Raises:
        ConfigError: settings are wrong; each is named as it was given.
    """
    problems: list[str] = []
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    unread: set[str] = set()
    for source in (_from_file(file or _file_in(environ)), _from_environment(environ), _from_flags(flags or {}, named)):
        for leaf, given, shown in source(problems):
            names[leaf.key] = shown
            try:
                values[leaf.key] = _read(leaf, given)
            except ValueError as error:
                problems.append(f"{shown}: {error}")
                unread.add(leaf.section)
    config = WorkerConfig(**{section: _build(section, kind, values) for section, kind in _sections().items()})
    problems.extend(_problems(config, names, except_in=unread))
    if problems:
        raise ConfigError(problems)
    return config


Entries = Iterator[tuple[Setting, object, str]]
"""(setting, given value, name under which it was given)."""


def _file_in(environ: Mapping[str, str]) -> Path | None:
    return Path(environ[CONFIG_FILE_NAME]) if environ.get(CONFIG_FILE_NAME) else None


def _from_file(path: Path | None) -> Callable[[list[str]], Entries]:
    def entries(problems: list[str]) -> Entries:
        known = {leaf.key: leaf for leaf in SETTINGS}
        for key, given in _file_values(path, problems) if path else ():
            if key in known:
                yield known[key], given, f"{path}: {key}"
            else:
                problems.append(f"{path}: {key}: unknown setting")

    return entries


def _file_values(path: Path, problems: list[str]) -> Iterator[tuple[str, object]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return
    for section, table in tables.items():
        if isinstance(table, dict):
            yield from ((f"{section}.{name}", value) for name, value in table.items())  # pyright: ignore[reportUnknownVariableType]  # TOML is untyped
        else:
            yield section, table


def _from_environment(environ: Mapping[str, str]) -> Callable[[list[str]], Entries]:
    def entries(problems: list[str]) -> Entries:
        known = {leaf.env_name: leaf for leaf in SETTINGS}
        ours = {name for name in environ if name.startswith(PREFIX)} - READ_ELSEWHERE
        for name in sorted(name for name in ours if not is_service_link(name, environ[name])):
            if name in known:
                yield known[name], environ[name], name
            else:
                problems.append(f"{name}: unknown setting; `worker start --help` lists all")

    return entries


def _from_flags(flags: Mapping[str, object], named: Callable[[Setting], str]) -> Callable[[list[str]], Entries]:
    def entries(problems: list[str]) -> Entries:
        known = {leaf.key: leaf for leaf in SETTINGS}
        for key, given in flags.items():
            yield known[key], given, named(known[key])

    return entries


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _read(leaf: Setting, given: object) -> object:
    """Convert a given value to the setting's type.

    Raises:
        ValueError: it cannot be converted. The message does not name the setting.
    """
    if leaf.choices:
        return _one_of(leaf.choices, given)
    kind = _without_none(leaf.kind)
    if kind is bool:
        return _switch(given)
    if kind is str:
        if isinstance(given, str) and given:
            return given
        raise ValueError(f"expected text, got {given!r}")
    return _number(kind, given, leaf.metavar.lower())


def _one_of(choices: tuple[str, ...], given: object) -> object:
    if given in choices:
        return given
    raise ValueError(f"expected one of {', '.join(choices)}, got {given!r}")


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    if isinstance(given, str) and given.lower() in _SWITCH:
        return _SWITCH[given.lower()]
    raise ValueError(f"expected true or false, got {given!r}")


def _number(kind: type[int] | type[float], given: object, unit: str) -> int | float:
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        try:
            number = kind(given)
        except ValueError:
            number = None
        if number is not None and number == number and (isinstance(given, str) or number == given):
            return number
    raise ValueError(f"expected {unit} as a {'whole ' if kind is int else ''}number, got {given!r}")


def _build(section: str, kind: Any, values: Mapping[str, object]) -> Any:  # noqa: ANN401  # as in `_sections`
    prefix = section + "."
    return kind(**{key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)})


def _problems(config: WorkerConfig, named: Mapping[str, str], *, except_in: set[str]) -> Iterator[str]:
    names = {leaf.key: leaf.env_name for leaf in SETTINGS} | dict(named)
    for section in [one for one in _sections() if one not in except_in]:
        part = getattr(config, section)
        for name, problem in part.problems() if hasattr(part, "problems") else ():
            yield f"{names[f'{section}.{name}']}: {problem}"
