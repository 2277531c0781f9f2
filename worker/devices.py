"""Device names: `cpu`, `cuda:N`, or several GPUs as `cuda:0,2` and `cuda:all`."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

from sluice.worker.errors import ConfigError

_DEVICE = re.compile(r"cpu|cuda(:(all|\d+(,\d+)*))?")
_COUNT = "import torch; print(torch.cuda.device_count(), torch.version.cuda or '')"

_MAX_DEVICES = 16
"""GPUs of a host."""


def is_device(text: str) -> bool:
    """Return whether `text` names one or more devices."""
    return _DEVICE.fullmatch(text) is not None


def is_several(device: str) -> bool:
    """Return whether `device` names several GPUs or all of them."""
    return device.endswith(":all") or "," in device


def devices_of(device: str, count_gpus: Callable[[], int] | None = None) -> list[str]:
    """List the single devices that `device` names.

    Raises:
        ConfigError: `device` names all GPUs, and there is none.
    """
    kind, _, which = device.partition(":")
    if which == "all":
        return [f"{kind}:{number}" for number in range((count_gpus or num_gpus)())]
    return [f"{kind}:{number}" for number in dict.fromkeys(which.split(","))] if which else [device]


def num_gpus() -> int:
    """Count the GPUs that torch sees; at least one.

    A subprocess counts them, so that this process neither imports torch nor opens a GPU.

    Raises:
        ConfigError: there is no GPU, or torch fails to report.
    """
    done = subprocess.run([sys.executable, "-P", "-c", _COUNT], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ConfigError([f"SLUICE_DEVICE: torch cannot count GPUs: {last_line[0]}"])
    count, *built_for = done.stdout.split()
    if int(count) == 0:
        build = "" if built_for else "; this torch is built without CUDA"
        raise ConfigError([f"SLUICE_DEVICE: there is no GPU (0 found{build}): run on --cpu"])
    return int(count)


def show_devices_from(index: int) -> None:
    """Let an engine see the GPUs from one on, of those that this process sees, if it takes the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Numbers that no GPU has end the list.
    names = visible.split(",") if visible else list(map(str, range(_MAX_DEVICES)))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index:])
