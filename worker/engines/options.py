"""Options of an engine's own (`--engine-option name=value`), as flags of that engine's command line."""

from collections.abc import Collection, Iterable, Mapping

from sluice.worker.errors import ConfigError


def flags_of(options: Iterable[str], *, decided: Collection[str], refused: Mapping[str, str]) -> list[str]:
    """Return the flags. `name` and `name=true` become `--name`, `name=false` becomes `--no-name`.

    Args:
        options: as the operator wrote them.
        decided: names of options that the worker's settings decide, with underscores.
        refused: names of options that would do nothing, each with the reason.

    Raises:
        ConfigError: one of them is decided or refused.
    """
    flags: list[str] = []
    for option in options:
        name, has_value, value = option.partition("=")
        flag = name.strip().lstrip("-").replace("_", "-")
        field = flag.replace("-", "_")
        if field in decided:
            raise refused_option(f"{name} has a setting of the worker's own, or must be as the worker sets it")
        if field in refused:
            raise refused_option(f"{name} would do nothing: {refused[field]}")
        if value.lower() == "false":
            flags.append(f"--no-{flag}")
        else:
            flags += [f"--{flag}", value] if has_value and value.lower() != "true" else [f"--{flag}"]
    return flags


def refused_option(why: str) -> ConfigError:
    """Return the error about an option that cannot be given."""
    return ConfigError([f"SLUICE_ENGINE_OPTION: {why}"])
