"""The bound on what the files of a tenant take, and what is answered beyond it."""

from sluice.producer.contract.bounds import TENANT_FILES_MIB
from sluice.producer.gateway.errors import HttpError
from sluice.producer.gateway.files.faults import TooManyBytes
from sluice.producer.gateway.files.store import File, FileStore
from sluice.producer.gateway.refusals import refusal
from sluice.producer.gateway.tables.threads import SQL


class Quota:
    """The bound for each tenant.

    Args:
        files: Count what is stored, over all gateways.
        max_bytes: The bound.
    """

    def __init__(self, files: FileStore, max_bytes: int) -> None:
        self._files, self._max_bytes = files, max_bytes

    async def check(self, tenant: str, num_bytes: int = 1) -> None:
        """Check before an upload or a batch that there is room, so that what must be refused is not received.

        Raises:
            HttpError: there is none.
        """
        if await SQL.run(self._files.stored_bytes, tenant) + num_bytes > self._max_bytes:
            raise self._refusal()

    async def add(self, file: File) -> None:
        """Add a file if there is room for it, also among uploads at the same time.

        Raises:
            HttpError: there is none.
        """
        try:
            await SQL.run(self._files.add, file, max_bytes=self._max_bytes)
        except TooManyBytes as error:
            raise self._refusal() from error

    def _refusal(self) -> HttpError:
        mib = self._max_bytes // 2**20
        return refusal(TENANT_FILES_MIB, f"the files of the tenant may take {mib} MiB: delete some of them first")
