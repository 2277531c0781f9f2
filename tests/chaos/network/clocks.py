"""The wall clock of each host, stepped by a preloaded library: no namespace of the kernel shifts it."""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "clock.c"
COMPILER = shutil.which("cc")
HOW_TO_GET = "needs a C compiler: apt-get install gcc"


class Clocks:
    """One file for each host, with its offset, written in place: its processes see a step at once. Mutable."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None, HOW_TO_GET
        self._folder = folder
        self._most_s = 0.0
        self._library = folder / "clock.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", SOURCE, "-o", self._library, "-ldl"], check=True)

    def environ(self, host: str) -> dict[str, str]:
        """The environment of a host's processes."""
        file = self._file(host)
        if not file.exists():
            file.write_bytes(struct.pack("=q", 0))
            file.chmod(0o644)
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(file)}

    def set_ahead(self, host: str, ahead_s: float) -> None:
        """Set a host's clock to so many seconds ahead of the machine's."""
        self._most_s = max(self._most_s, ahead_s)
        with self._file(host).open("rb+") as file:
            file.write(struct.pack("=q", round(ahead_s * 1e9)))

    def catch_up(self) -> None:
        """Set each clock to the most that any was ahead: else a key would be kept for longer than is stated."""
        for file in self._folder.glob("clock-*"):
            self.set_ahead(file.name.removeprefix("clock-"), self._most_s)

    def _file(self, host: str) -> Path:
        return self._folder / f"clock-{host}"
