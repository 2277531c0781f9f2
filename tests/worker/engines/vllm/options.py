"""Load vLLM with options of its own, for a Python that has it; print what is wrong with each, one a line."""

import sys

from sluice.worker.config import load_config
from sluice.worker.engines.registry import prepare
from sluice.worker.errors import ConfigError


def main() -> None:
    """Try the options that are arguments."""
    for option in sys.argv[1:]:
        settings = {"SLUICE_ENGINE": "vllm", "SLUICE_DTYPE": "float32", "SLUICE_ENGINE_OPTION": option}
        try:
            prepare(load_config(settings)).load()
        except ConfigError as error:
            sys.stdout.write(" ".join(error.problems) + "\n")
        else:
            sys.stdout.write("loaded\n")


if __name__ == "__main__":
    main()
