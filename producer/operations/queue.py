"""The name of a queue, its partitions and their keys."""

from dataclasses import dataclass

from sluice.producer.contract import limits
from sluice.producer.contract.job_ids import split_job_id
from sluice.producer.contract.keys import QueueKeys
from sluice.producer.contract.wire import WireError
from sluice.producer.errors import InvalidJob


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's name and number of partitions.

    Raises:
        InvalidJob: the name cannot be part of a key.
    """

    name: str
    partitions: int = 1

    def __post_init__(self) -> None:
        is_fine = 0 < len(self.name) <= limits.MAX_QUEUE_NAME_CHARS and not set(self.name) & set("{}: \n\r\t")
        if not is_fine or self.partitions < 1:
            raise InvalidJob(
                f"a queue's name is 1 to {limits.MAX_QUEUE_NAME_CHARS} characters without braces, colons and spaces, "
                f"and it has 1 partition or more; got {self.name!r} and {self.partitions}"
            )

    def keys(self, partition: int) -> QueueKeys:
        """Return the keys of one partition."""
        return QueueKeys(self.name, partition)

    def keys_of(self, job_id: str) -> QueueKeys:
        """Return the keys of the partition that holds this job.

        Raises:
            InvalidJob: not a job id.
        """
        return QueueKeys(self.name, partition_in(job_id))

    def all_keys(self) -> list[QueueKeys]:
        """Return the keys of every partition."""
        return [self.keys(partition) for partition in range(self.partitions)]


def partition_in(job_id: str) -> int:
    """Return the partition of a job id.

    Raises:
        InvalidJob: not a job id.
    """
    try:
        return split_job_id(job_id)[0]
    except (WireError, TypeError) as error:
        raise InvalidJob(str(error)) from error
