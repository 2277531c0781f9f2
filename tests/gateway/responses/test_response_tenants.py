"""Keys of several tenants, with other scopes, at one gateway."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import openai
import pytest

from tests.gateway.gateway_process import GatewayProcess, gateway_process, new_key
from tests.gateway.responses.reading import wait_for
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

SCOPES = ("submit", "read", "control")
Ask = Callable[[openai.OpenAI, str], object]


@dataclass(frozen=True)
class Tenants:
    """A gateway with keys, and a client for each kind of key."""

    acme: openai.OpenAI
    other: openai.OpenAI
    reader: openai.OpenAI
    submitter: openai.OpenAI
    limited: openai.OpenAI


@pytest.fixture(scope="module")
def tenants(queue_server: RedisServer, keys_url: str) -> Generator[Tenants]:
    """Two tenants; some keys of the first may do less."""
    with gateway_process(queue_server.url, database_url=keys_url) as gateway:

        def client(tenant: str, **fields: object) -> openai.OpenAI:
            return gateway.client(new_key(keys_url, tenant, **fields))

        made = Tenants(
            acme=client("acme", scopes=SCOPES),
            other=client("initech", scopes=SCOPES),
            reader=client("acme", scopes=("read",)),
            submitter=client("acme", scopes=("submit",)),
            limited=client("acme", rpm=1),
        )
        wait_for_keys(gateway, made)
        yield made
        for opened in (made.acme, made.other, made.reader, made.submitter, made.limited):
            opened.close()


def wait_for_keys(gateway: GatewayProcess, made: Tenants) -> None:
    """Until the gateway has read the newest key."""

    def is_known() -> bool:
        return gateway.get("/v1/models", made.limited.api_key).status_code == 200

    wait_for(is_known)


BY_ID: dict[str, Ask] = {
    "retrieve": lambda client, name: client.responses.retrieve(name),
    "stream": lambda client, name: list(client.responses.retrieve(name, stream=True)),
    "cancel": lambda client, name: client.responses.cancel(name),
    "delete": lambda client, name: client.responses.delete(name),
    "input_items": lambda client, name: client.responses.input_items.list(name),
    "previous": lambda client, name: client.responses.create(model="null", input="a", previous_response_id=name),
}


class TestGivenAResponseOfAnotherTenant:
    @pytest.mark.parametrize("ask", BY_ID)
    def test_when_its_id_is_used_then_it_is_as_an_unknown_one(self, tenants: Tenants, ask: str) -> None:
        made = tenants.acme.responses.create(model="null", input="secret", max_output_tokens=8, background=True)

        with pytest.raises(openai.NotFoundError) as theirs:
            BY_ID[ask](tenants.other, made.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            BY_ID[ask](tenants.other, "resp_" + "0" * 48)

        assert theirs.value.message.replace(made.id, "resp_" + "0" * 48) == unknown.value.message
        assert tenants.acme.responses.retrieve(made.id).id == made.id


class TestGivenAKeyThatMayDoLess:
    @pytest.mark.parametrize(
        ("name", "refused"),
        [("reader", ("previous", "cancel", "delete")), ("submitter", ("retrieve", "stream", "input_items", "delete"))],
    )
    def test_when_it_lacks_the_scope_then_it_is_403(
        self, tenants: Tenants, name: str, refused: tuple[str, ...]
    ) -> None:
        made = tenants.acme.responses.create(model="null", input="a", max_output_tokens=4)

        for ask in refused:
            with pytest.raises(openai.PermissionDeniedError) as raised:
                BY_ID[ask](getattr(tenants, name), made.id)
            assert raised.value.code == "missing_scope"

    def test_when_its_limit_is_reached_then_it_is_429_and_nothing_is_kept(self, tenants: Tenants) -> None:
        first = tenants.limited.responses.with_raw_response.create(model="null", input="a", max_output_tokens=4)

        with pytest.raises(openai.RateLimitError) as raised:
            tenants.limited.responses.create(model="null", input="a", max_output_tokens=4)

        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(raised.value.response.headers["retry-after"]) > 0
