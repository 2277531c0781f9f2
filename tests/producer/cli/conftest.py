"""The `producer` command, run in the test's process."""

import io
import sys
from pathlib import Path

import pytest

from sluice.producer.cli.main import main
from tests.producer.commands import Ended, Run
from tests.servers import RedisServer


@pytest.fixture
def run(
    valkey: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run `producer` with these arguments, in the test's folder."""
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey.url)
    monkeypatch.setenv("SLUICE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("SLUICE_DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run
