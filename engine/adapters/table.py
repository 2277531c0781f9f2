"""The adapters that a model has loaded, by place. The scheduler says which is in which place."""

from collections.abc import Iterable

import torch

from sluice.engine.adapters.catalogue import Adapter, Catalogue
from sluice.engine.adapters.modules import StackedModules
from sluice.engine.adapters.weights import AdapterWeights
from sluice.engine.batch import Admission
from sluice.engine.errors import AdapterError
from sluice.kernels.adapters.products import AdaptedProducts


class AdapterTable:
    """Loaded adapters. Changes when a step brings a sequence whose adapter is not in its place."""

    def __init__(
        self, catalogue: Catalogue, modules: list[StackedModules], products: AdaptedProducts, dtype: torch.dtype
    ) -> None:
        self._catalogue, self._modules, self._products, self._dtype = catalogue, modules, products, dtype
        self._names: dict[int, str] = {}

    def load(self, admissions: Iterable[Admission]) -> None:
        """Put the adapters of these sequences in their places.

        Raises:
            AdapterError: one cannot be read, or is not the one that was there when the model was loaded.
        """
        for admission in admissions:
            place, name = admission.adapter_place, admission.adapter
            if name and self._names.get(place) != name:
                self._put(place, self._catalogue.adapters[name])

    def _put(self, place: int, adapter: Adapter) -> None:
        if adapter.folder.hash() != adapter.hash:
            raise AdapterError(
                f"the files of the adapter {adapter.folder.name!r} have changed since this worker started: restart it."
            )
        pairs = AdapterWeights(adapter.folder, self._modules).pairs(self._dtype)
        self._names.pop(place, None)
        self._products.put(place, pairs)
        self._names[place] = adapter.folder.name
