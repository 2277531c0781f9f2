"""The engines that are installed: entry points of the group `sluice.engines`.

An entry point names a function like `prepare`, which an engine of another distribution may provide. It checks the
settings and the model's files without its weights, and its `PreparedModel` loads them:

```toml
[project.entry-points."sluice.engines"]
mine = "package.module:prepare"
```

The model that it loads says in `facts.capabilities` what the engine can run. `features_without` of
`worker/model/offered.py` names the features that are left without the options that it refuses. The worker rejects
requests that state those; another worker of the queue may take the job.

A worker runs an engine other than its own in a process of its own, unless `--engine-process off` is given, and by
another environment's Python if it is told so.
"""

from importlib.metadata import entry_points

from sluice.worker.config import WorkerConfig
from sluice.worker.errors import ConfigError
from sluice.worker.model.loaded_model import LoadedModel, PreparedModel

GROUP = "sluice.engines"


def installed() -> list[str]:
    """Return the names of the engines that are installed, in order."""
    return sorted(entry_points(group=GROUP).names)


def prepare(config: WorkerConfig) -> PreparedModel[LoadedModel]:
    """Let the configured engine check the settings of the model, its files and its device.

    Raises:
        ConfigError: no such engine is installed, or the settings do not allow it.
        WorkerBroken: the device is unavailable now.
    """
    name = config.model.engine
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise ConfigError([f"SLUICE_ENGINE: no engine {name} is installed; there is {', '.join(installed())}"])
    return found[0].load()(config)


def load(config: WorkerConfig) -> LoadedModel:
    """Load the configured model by the configured engine.

    Raises:
        ConfigError: the settings do not allow it.
        WorkerBroken: memory or the device is unavailable now.
    """
    return prepare(config).load()
