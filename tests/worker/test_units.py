"""The systemd units restart what ends, however often, and stop each service as its program expects it."""

from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(path.name for path in DEPLOY.glob("*.service"))


def settings_of(unit: str) -> dict[str, str]:
    """Each `section.name` of a unit, and its last value."""
    found: dict[str, str] = {}
    section = ""
    for line in (DEPLOY / unit).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[f"{section}.{name}"] = value
    return found


class TestGivenAUnit:
    @pytest.mark.parametrize("unit", UNITS)
    def test_when_its_service_fails_again_and_again_then_it_is_always_restarted(self, unit: str) -> None:
        settings = settings_of(unit)

        assert settings["Service.Restart"] == "on-failure"
        assert settings["Unit.StartLimitIntervalSec"] == "0", "systemd gives up after five starts in ten seconds"
        assert settings["Service.RestartSec"] == "5"

    @pytest.mark.parametrize("unit", ["sluice-callbacks.service", "sluice-worker@.service"])
    def test_when_its_service_stops_then_only_the_parent_process_is_signalled(self, unit: str) -> None:
        assert settings_of(unit)["Service.KillMode"] == "mixed"
