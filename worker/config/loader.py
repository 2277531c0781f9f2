"""Build the worker's configuration from defaults, a TOML file, the environment and flags."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

from sluice.protocol.settings import CONFIG_FILE_NAME, GATEWAY, PREFIX, Declared, GivenSettings, Setting, settings_of
from sluice.worker.config.schema import WorkerConfig
from sluice.worker.errors import ConfigError

READ_ELSEWHERE = frozenset({CONFIG_FILE_NAME, "SLUICE_STATE_DIR", "SLUICE_API_KEY"})
"""Names with the prefix that others read, such as the gateway's clients; they are not errors here."""


def _sections() -> dict[str, Any]:  # the sections are dataclasses without a common base
    return get_type_hints(WorkerConfig)


SETTINGS: tuple[Setting, ...] = tuple(one for name, kind in _sections().items() for one in settings_of(name, kind))

_DECLARED = Declared(
    settings=SETTINGS,
    is_ours=lambda name: name not in READ_ELSEWHERE and not name.startswith(PREFIX + GATEWAY),
    hint="`worker start --help` lists all",
    other_sections=("gateway",),
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
    given = _DECLARED.read(environ, file=file, flags=flags, named=named)
    config = WorkerConfig(**{section: kind(**given.of(section)) for section, kind in _sections().items()})
    if problems := [*given.problems, *_problems(config, given)]:
        raise ConfigError(problems)
    return config


def _problems(config: WorkerConfig, given: GivenSettings) -> Iterator[str]:
    names = {one.key: one.env_name for one in SETTINGS} | given.names
    for section in [one for one in _sections() if one not in given.unread]:
        part = getattr(config, section)
        for name, problem in part.problems() if hasattr(part, "problems") else ():
            yield f"{names[f'{section}.{name}']}: {problem}"
