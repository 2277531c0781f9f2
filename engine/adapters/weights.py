"""Read an adapter's weights: a pair of low-rank matrices for each module that it changes."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.engine.adapters.catalogue import Catalogue
from sluice.engine.adapters.folder import WEIGHTS, AdapterFolder
from sluice.engine.adapters.modules import StackedModules, modules_of
from sluice.engine.errors import AdapterError
from sluice.engine.models.config import DecoderConfig
from sluice.engine.models.weights import DTYPES
from sluice.kernels.adapters import LowRank

_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
_TEXT_PART = re.compile(r"^language_model\.(?=model\.)|(?<=^model\.)language_model\.")
_EMBEDDINGS = re.compile(r"lora_embedding_|\b(embed_tokens|lm_head)\b")


class AdapterWeights:
    """The tensors of an adapter by module, checked against a model. Its file is read when they are."""

    def __init__(self, folder: AdapterFolder, modules: Sequence[StackedModules]) -> None:
        """Read which tensors there are, and check that they are those of the config and of the model.

        Raises:
            AdapterError: they are not, or the file is damaged.
        """
        self._folder, self._modules = folder, modules
        self._file = _open(folder)
        self._names: dict[tuple[str, str], str] = {}
        for name in self._file.keys():  # noqa: SIM118 - not a dict
            self._names[self._module_and_side(name)] = name
        self._check_modules()

    def pairs(self, dtype: torch.dtype) -> list[list[LowRank | None]]:
        """Return for each product a pair for each module that it stacks; None where it changes nothing.

        Raises:
            AdapterError: the file cannot be read.
        """
        return [
            [self._pair(name, product.part_order(index), dtype) for index, name in enumerate(product.names)]
            for product in self._modules
        ]

    def _pair(self, module: str, order: Tensor | None, dtype: torch.dtype) -> LowRank | None:
        if (module, "A") not in self._names:
            return None
        down, up = (self._tensor(module, side) for side in "AB")
        scaled = up.float() * self._folder.scale_of(module)
        return LowRank(down.to(dtype), (scaled if order is None else scaled[order]).to(dtype))

    def _tensor(self, module: str, side: str) -> Tensor:
        try:
            return cast("Tensor", self._file.get_tensor(self._names[module, side]))
        except (SafetensorError, OSError) as error:
            raise self._error(f"cannot be read: {error}") from error

    def _module_and_side(self, name: str) -> tuple[str, str]:
        if _EMBEDDINGS.search(name):
            raise self._error(f"is not supported: it changes embeddings or the output head ({name})")
        if "lora_magnitude_vector" in name:
            raise self._error(f"is not supported: it is a DoRA ({name})")
        found = _NAME.match(name)
        if found is None:
            raise self._error(f"has a tensor {name!r}, which is not of a pair of low rank")
        return _TEXT_PART.sub("", found["module"]), found["side"]

    def _check_modules(self) -> None:
        sizes = {
            name: (size, product.sizes.in_size)
            for product in self._modules
            for name, size in zip(product.names, product.sizes.part_sizes, strict=True)
        }
        changed = {module for module, _ in self._names}
        if unknown := sorted(changed - sizes.keys()):
            raise self._error(f"changes {unknown[0]!r}, which is no linear layer of attention or MLP of this model")
        for module in sorted(changed):
            if not self._folder.targets(module):
                raise self._error(f"has weights of {module!r}, which target_modules does not name")
            self._check_pair(module, *sizes[module])
        if self._folder.is_whole:
            self._check_complete(sizes.keys() - changed)
        if not changed:
            raise self._error("changes nothing: its file has no tensors")

    def _check_complete(self, unchanged: Iterable[str]) -> None:
        if lacking := sorted(filter(self._folder.targets, unchanged)):
            raise self._error(f"lacks the weights of {lacking[0]!r}, which target_modules names")

    def _check_pair(self, module: str, out_size: int, in_size: int) -> None:
        rank = self._folder.rank_of(module)
        for side, expected in (("A", (rank, in_size)), ("B", (out_size, rank))):
            if (module, side) not in self._names:
                raise self._error(f"lacks lora_{side} of {module!r}")
            part = self._file.get_slice(self._names[module, side])
            if tuple(part.get_shape()) != expected:
                found = tuple(part.get_shape())
                raise self._error(f"has lora_{side} of {module!r} as {found}; this model and its rank need {expected}")
            if part[:0].dtype not in DTYPES.values():
                raise self._error(f"has lora_{side} of {module!r} in another dtype than fp32, fp16 or bf16")

    def _error(self, what: str) -> AdapterError:
        return AdapterError(f"the adapter {self._folder.name!r} {what}.")


def check_adapters(catalogue: Catalogue, config: DecoderConfig) -> None:
    """Check that each adapter is one of this model.

    Raises:
        AdapterError: one is not.
    """
    modules = modules_of(config)
    for adapter in catalogue.adapters.values():
        AdapterWeights(adapter.folder, modules)


def _open(folder: AdapterFolder) -> Any:  # noqa: ANN401 - safe_open has no types
    try:
        return safe_open(folder.path / WEIGHTS, framework="pt")
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"the adapter {folder.name!r} is corrupt or truncated: {error}.") from error
