"""Check the device, the model and the kernels."""

import importlib.util
import shutil
from collections.abc import Iterator

from sluice.engine.execution.threads import default_num_threads
from sluice.kernels.compiler import COMPILERS
from sluice.worker.checks.result import CheckResult, warning
from sluice.worker.checks.site import Site
from sluice.worker.device_driver import driver_of
from sluice.worker.errors import ConfigError
from sluice.worker.model.folders import check_name, is_null, must_download
from sluice.worker.model.load import check_device as check_one_device


def check_device(site: Site) -> Iterator[CheckResult]:
    """Check that torch is installed and that it sees each configured device.

    Raises:
        ConfigError: it is not, or it does not.
    """
    if is_null(site.config.model):
        yield CheckResult(what="device", found="the null model uses none")
        return
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(["torch is not installed: pip install 'sluice-llm[worker]'"])
    for device in site.devices:
        check_one_device(device)
        yield CheckResult(what="device", found=_described(device))


def _described(device: str) -> str:
    import torch

    kind, _, index = device.partition(":")
    if kind == "cpu":
        return f"cpu, {default_num_threads()} threads, torch {torch.__version__}"
    driver, name = driver_of(device), torch.cuda.get_device_name(int(index or 0))
    memory = driver.memory_bytes() if driver is not None else None
    return name if memory is None else f"{name}, {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free"


def check_model(site: Site) -> Iterator[CheckResult]:
    """Check the model except its weights. A model that must be downloaded is checked after the download.

    Raises:
        ConfigError: there is none, its files are wrong, or they do not fit the settings.
    """
    path = site.config.model.path
    if path is not None and must_download(path):
        check_name(path)
        yield CheckResult(what="model", found=f"{path} is not a folder on this host; it will be downloaded at startup")
        return
    yield CheckResult(what="model", found=site.model.description)


def check_kernels(site: Site) -> Iterator[CheckResult]:
    """Check the CPU kernels as a start loads them; for a GPU, the compiler that Triton's launchers need."""
    if is_null(site.config.model):
        return
    if site.config.model.device != "cpu":
        yield _compiler()
        return
    from sluice.kernels import native

    packaged = native.packaged_library()
    if native.library() is None:
        yield warning("kernels", "none, PyTorch's operators are used", f"{native.SLOWER} {native.ADVICE}")
    else:
        yield CheckResult(what="kernels", found=f"for {packaged.stem}" if packaged else "compiled on this machine")


def _compiler() -> CheckResult:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is not None:
        return CheckResult(what="compiler", found=compiler)
    return warning("compiler", "none", "Triton compiles a launcher for each kernel at first use. Install gcc or clang.")
