"""The adapters that a model has loaded, by place. The scheduler says which is in which place."""

from collections.abc import Callable, Iterable

from sluice.engine.adapters.catalogue import Adapter, Catalogue
from sluice.engine.adapters.folder import AdapterFolder
from sluice.engine.batch import Admission
from sluice.engine.errors import AdapterError

Put = Callable[[int, AdapterFolder], None]
"""Puts an adapter in a place, instead of the one that is there. Raises AdapterError if it cannot."""


class AdapterTable:
    """Loaded adapters. Changes when a step brings a sequence whose adapter is not in its place."""

    def __init__(self, catalogue: Catalogue, put: Put) -> None:
        self._catalogue, self._put_folder = catalogue, put
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
        self._names.pop(place, None)
        self._put_folder(place, adapter.folder)
        self._names[place] = adapter.folder.name
