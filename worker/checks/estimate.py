"""What a model takes and how fast it can be at most, which `worker doctor` prints before anything is loaded."""

from collections.abc import Iterator

from sluice.worker.checks.site import CheckResult, Site, warning
from sluice.worker.model.folders import is_null, must_download

_BILLION, _MILLION = 1e9, 1e6


def check_estimate(site: Site) -> Iterator[CheckResult]:
    """Count what the model takes, and measure how fast the device reads its memory.

    Raises:
        ConfigError: as the check of the model.
    """
    path = site.config.model.path
    if is_null(site.config.model) or (path is not None and must_download(path)) or site.model.needs is None:
        return
    # Imported here because torch takes seconds to import, and the null model does not need it.
    import torch

    from sluice.engine.execution.start.needs import bandwidth_bytes_per_s

    needs, device = site.model.needs(), torch.device(site.devices[0])
    found = (
        f"{_counted(needs.num_parameters)} parameters take {_size(needs.weight_bytes)}, one sequence of "
        f"{needs.max_model_len} tokens {_size(needs.sequence_bytes)}; {_size(needs.free_bytes)} are free"
    )
    if needs.fits:
        yield CheckResult("memory", found)
    else:
        advice = "Lower --max-model-len, use --quantization, or free memory: it does not fit now."
        yield warning("memory", found, advice)
        return
    bandwidth = bandwidth_bytes_per_s(device)
    yield CheckResult(
        "speed",
        f"one sequence generates about {bandwidth / needs.read_bytes:.0f} tokens/s if memory is its bound: each reads "
        f"{_size(needs.read_bytes)} of weights, and {bandwidth / 2**30:.0f} GiB/s were measured",
    )


def _counted(number: int) -> str:
    return f"{number / _BILLION:.1f} billion" if number >= _BILLION else f"{number / _MILLION:.1f} million"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
