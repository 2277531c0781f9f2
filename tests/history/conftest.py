"""The fixtures of tests/worker."""

from tests.worker.fixtures import history as history
from tests.worker.fixtures import history_url as history_url
from tests.worker.fixtures import log as log
from tests.worker.fixtures import migrated_database as migrated_database
from tests.worker.fixtures import one_scene as one_scene
from tests.worker.fixtures import postgres as postgres
from tests.worker.fixtures import postgres_empty_url as postgres_empty_url
from tests.worker.fixtures import postgres_history as postgres_history
from tests.worker.fixtures import postgres_url as postgres_url
from tests.worker.fixtures import scene as scene
