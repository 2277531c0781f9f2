"""`SamplingParams`: how to sample, by keyword. Needs no torch."""

from dataclasses import dataclass
from typing import Unpack

from sluice.protocol.errors import InvalidJob
from sluice.protocol.jobs import check_seed, sampling_options
from sluice.protocol.sampling import JobOptions, SamplingOptions


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """How to choose tokens and when to stop: the sampling options of a job, with the same names, defaults and ranges.

    `SamplingOptions` describes each.
    """

    options: JobOptions
    seed: int | None

    def __init__(self, *, seed: int | None = None, **options: Unpack[SamplingOptions]) -> None:
        """Check the options.

        Args:
            seed: Seed of the noise, an unsigned 64-bit number. Default: None, drawn at random for each prompt.
            **options: How to sample.

        Raises:
            InvalidJob: a name is unknown or a value is out of its range; a `ValueError`.
        """
        if seed is not None:
            check_seed(seed)
        checked = sampling_options(options)
        if checked.echo:
            raise InvalidJob("echo is for jobs; ask for `prompt_logprobs`")
        object.__setattr__(self, "options", checked)
        object.__setattr__(self, "seed", seed)
