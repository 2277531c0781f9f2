"""What `worker doctor` says of a model's memory and speed before it is loaded."""

import json
import re
import shutil
from pathlib import Path

from click.testing import CliRunner

from sluice.worker.cli import main
from sluice.worker.model.folders import SMALL_MODEL
from tests.servers import RedisServer


def doctor(valkey: RedisServer, out: Path, model: Path) -> str:
    settings = ["--redis-url", valkey.url, "--database-url", f"sqlite:///{out}/history.db", "--metrics-port", "0"]
    result = CliRunner().invoke(main, ["doctor", *settings, "--model", str(model)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.output


class TestGivenAModelThatFits:
    def test_when_it_is_examined_then_its_memory_and_its_speed_are_said(
        self, valkey: RedisServer, tmp_path: Path
    ) -> None:
        output = doctor(valkey, tmp_path, SMALL_MODEL)

        assert re.search(
            r"^ok +memory: 3\.\d million parameters take .* MiB, one sequence of \d+ tokens .* are free$", output, re.M
        )
        assert re.search(r"^ok +speed: one sequence generates about \d+ tokens/s", output, re.M)


class TestGivenAModelThatDoesNotFit:
    def test_when_it_is_examined_then_a_warning_says_so(self, valkey: RedisServer, tmp_path: Path) -> None:
        folder = tmp_path / "large"
        shutil.copytree(SMALL_MODEL, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "intermediate_size": 2**24, "num_hidden_layers": 5000})
        )

        output = doctor(valkey, tmp_path, folder)

        assert re.search(r"^warn +memory: \d+\.\d billion parameters take", output, re.M)
        assert "it does not fit now" in output
        assert "speed:" not in output
