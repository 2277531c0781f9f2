"""What a device's name stands for: `cpu`, `cuda:N`, or several GPUs as `cuda:0,2` and `cuda:all`."""

import re
import subprocess
import sys
from collections.abc import Callable

from worker.errors import ConfigError

_DEVICE = re.compile(r"cpu|cuda(:(all|\d+(,\d+)*))?")
_COUNT = "import torch; print(torch.cuda.device_count(), torch.version.cuda or '')"


def is_device(text: str) -> bool:
    """Whether `text` names a device, or several."""
    return _DEVICE.fullmatch(text) is not None


def is_several(device: str) -> bool:
    """Whether `device` names several GPUs, or as many as there are."""
    return device.endswith(":all") or "," in device


def devices_of(device: str, count_gpus: Callable[[], int] | None = None) -> list[str]:
    """The devices that `device` names, one by one.

    Raises:
        ConfigError: it names all GPUs, and there is none.
    """
    kind, _, which = device.partition(":")
    if which == "all":
        return [f"{kind}:{number}" for number in range((count_gpus or num_gpus)())]
    return [f"{kind}:{number}" for number in dict.fromkeys(which.split(","))] if which else [device]


def num_gpus() -> int:
    """GPUs that torch sees, at least one. Asked of a process of its own: this one stays small, and no GPU's user.

    Raises:
        ConfigError: there is none, or torch cannot say.
    """
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError([f"SLUICE_DEVICE: torch cannot say how many GPUs there are: {said[0]}"])
    count, *built_for = done.stdout.split()
    if int(count) == 0:
        build = "" if built_for else "; this torch is built without CUDA"
        raise ConfigError([f"SLUICE_DEVICE: there is no GPU (0 found{build}): run on --cpu"])
    return int(count)
