"""The fixtures of this folder; tests/gateway has them too."""

from tests.producer.fixtures import history_url as history_url
from tests.producer.fixtures import migrated_postgres_url as migrated_postgres_url
from tests.producer.fixtures import producer as producer
from tests.producer.fixtures import redis_client as redis_client
from tests.producer.fixtures import worker as worker
