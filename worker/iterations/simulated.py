"""The iterations of a traffic in virtual time: the real engine, over steps whose duration is given."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sluice.engine.null_model import NullModelConfig
from sluice.engine.scheduling.timing.step_time import StepTime
from sluice.engine.watching import Iteration
from sluice.worker.config import DEFAULT_BLOCK_SIZE, WorkerConfig
from sluice.worker.errors import ConfigError
from sluice.worker.model.load import engine_config
from sluice.worker.tune.replay import simulate
from sluice.worker.tune.traffic import read_traffic


def simulated_iterations(
    config: WorkerConfig, traffic: Path, step_time: StepTime, watcher: Callable[[Iteration], None]
) -> None:
    """Replay a file of traffic with the settings of `config`; pass each iteration to `watcher`.

    Raises:
        ConfigError: the file or a setting is wrong, or a request cannot run with these settings.
    """
    sizes = {"num_blocks": config.model.num_blocks, "max_model_len": config.model.max_model_len}
    cache = NullModelConfig(
        block_size=config.model.block_size or DEFAULT_BLOCK_SIZE,
        **{name: size for name, size in sizes.items() if size is not None},
    )
    arrivals = read_traffic(traffic, _no_text, rate=1.0)
    try:
        simulate(arrivals, step_time, engine_config(config), cache, watcher=watcher)
    except RuntimeError as error:
        raise ConfigError([f"{traffic}: {error}"]) from error


def _no_text(_text: str) -> NoReturn:
    raise ValueError("a simulation has no tokenizer: give prompt_tokens instead of prompt")
