"""What `sluice` and `sluice.producer` export, and what importing them loads."""

import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

import sluice
from sluice import producer
from sluice.producer import errors
from sluice.version import installed_version

ERRORS = sorted(
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
)
CLIENT_MODULES = {"sluice.producer.client", "sluice.producer.aio", "sluice.producer.errors", "redis", "torch"}
"""What only a program that uses a client needs."""


def loaded_by(program: str) -> set[str]:
    show = "import sys; print(*sys.modules, sep='\\n')"
    command = [sys.executable, "-c", f"{program}\n{show}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


class TestGivenThePackageSluice:
    def test_when_it_is_imported_then_no_client_is_loaded(self) -> None:
        loaded = loaded_by("import sluice")

        assert not loaded & CLIENT_MODULES

    @pytest.mark.parametrize("name", ["Producer", "AsyncProducer"])
    def test_when_a_client_is_imported_then_it_is_the_producer_s_and_torch_stays_out(self, name: str) -> None:
        loaded = loaded_by(f"from sluice import {name}")

        assert getattr(sluice, name) is getattr(producer, name)
        assert "torch" not in loaded

    def test_when_a_name_does_not_exist_then_it_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
            _ = sluice.Consumer  # pyright: ignore[reportAttributeAccessIssue] (that is the test)


class TestGivenThePackageProducer:
    def test_when_it_is_imported_then_no_client_is_loaded(self) -> None:
        loaded = loaded_by("import sluice.producer")

        assert not loaded & CLIENT_MODULES

    def test_when_an_error_is_imported_from_it_then_no_client_is_loaded(self) -> None:
        loaded = loaded_by("from sluice.producer import QueueFull")

        assert not loaded & (CLIENT_MODULES - {"sluice.producer.errors"})

    @pytest.mark.parametrize("name", ERRORS)
    def test_when_an_error_is_public_then_it_is_exported(self, name: str) -> None:
        assert name in producer.__all__
        assert getattr(producer, name) is getattr(errors, name)

    @pytest.mark.parametrize("name", producer.__all__)
    def test_when_a_name_is_exported_then_it_can_be_imported(self, name: str) -> None:
        assert name in dir(producer)
        assert getattr(producer, name) is not None

    def test_when_a_name_does_not_exist_then_it_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
            _ = producer.Consumer  # pyright: ignore[reportAttributeAccessIssue] (that is the test)


class TestGivenTheSourceWithoutAnInstallation:
    def test_when_the_version_is_asked_for_then_it_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def not_installed(name: str) -> str:
            raise PackageNotFoundError(name)

        monkeypatch.setattr("sluice.version.version", not_installed)
        installed_version.cache_clear()

        assert installed_version() == "unknown"
        installed_version.cache_clear()

    @pytest.mark.parametrize("command", ["producer", "worker"])
    def test_when_a_command_is_asked_then_it_answers(self, command: str) -> None:
        hidden = (
            "import importlib.metadata as m, runpy, sys\n"
            "def version(name): raise m.PackageNotFoundError(name)\n"
            "m.version = version\n"
            f"sys.argv = ['{command}', '--version']\n"
            f"runpy.run_module('sluice.{command}', run_name='__main__')\n"
        )
        done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)

        assert (done.returncode, done.stdout.split()[-1]) == (0, "unknown"), done.stderr
