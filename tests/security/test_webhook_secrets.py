"""A tenant that can verify its webhooks cannot sign those of others."""

import json
import time

import pytest
from click.testing import CliRunner

from sluice.producer import BadSignature, verify_webhook
from sluice.protocol.webhooks import sign, tenant_secrets
from sluice.worker.cli import main
from sluice.worker.errors import ExitCode
from tests.history.test_recorder import client_of
from tests.servers import RedisServer
from tests.worker.callbacks.receiver import receiver
from tests.worker.callbacks.test_callbacks import complete_batch, end_job, mover, settings_for, work

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def secret_of(*arguments: str, key: str = KEY) -> str:
    """What the command prints."""
    ended = CliRunner().invoke(main, ["webhook-secret", *arguments], env={"SLUICE_CALLBACKS_SECRET": key})
    assert ended.exit_code == 0, ended.output
    return ended.stdout.strip()


class TestGivenWebhooksOfTwoTenantsAndABatch:
    @pytest.mark.parametrize("key", [KEY, "in plain text", f"{KEY} newer"])
    def test_when_each_is_verified_then_it_is_with_its_own_secret_only(self, valkey: RedisServer, key: str) -> None:
        client, owners = client_of(valkey), ("acme", "zoe", "--batches")
        with receiver() as hook:
            for tenant in owners[:2]:
                end_job(client, hook.url, f"0.{tenant}.1")
            complete_batch(client, hook.url)
            mover(valkey, secret=key).drain()
            work(client, settings_for(valkey, secret=key))
            got = {str(json.loads(body)["data"].get("job_id")): (headers, body) for headers, body in hook.got}

        secrets = {owner: secret_of(owner, key=key) for owner in owners}
        for owner, name in zip(owners, ("0.acme.1", "0.zoe.1", "None"), strict=True):
            assert verify_webhook(secrets[owner], *got[name])
            for other in (key, *(secret for one, secret in secrets.items() if one != owner)):
                with pytest.raises(BadSignature):
                    verify_webhook(other, *got[name])

    def test_when_one_signs_an_event_of_the_other_then_it_is_refused(self) -> None:
        body = json.dumps({"data": {"job_id": "0.zoe.1"}}).encode()
        forged = sign(secret_of("acme"), event_id="evt_1", timestamp_s=round(time.time()), body=body)

        with pytest.raises(BadSignature):
            verify_webhook(secret_of("zoe"), forged, body)


class TestGivenARotation:
    def test_when_a_key_is_added_then_old_and_new_secrets_verify(self) -> None:
        old, new = tenant_secrets(KEY, "acme"), tenant_secrets("newer", "acme")
        signed = sign(secret_of("acme", key=f"{KEY} newer"), event_id="evt_1", timestamp_s=100, body=b"{}")

        assert secret_of("acme", key=f"{KEY} newer") == f"{old} {new}"
        for secret in (old, new, f"{KEY} {old}"):
            assert verify_webhook(secret, signed, b"{}", now_s=100) == "evt_1"


class TestGivenTheCommand:
    @pytest.mark.parametrize("arguments", [[], ["acme", "--batches"], ["ACME!"], [""], ["a" * 65]])
    def test_when_it_is_misused_then_it_prints_no_secret(self, arguments: list[str]) -> None:
        ended = CliRunner().invoke(main, ["webhook-secret", *arguments], env={"SLUICE_CALLBACKS_SECRET": KEY})

        assert ended.exit_code == ExitCode.MISUSED
        assert "whsec_" not in ended.output

    def test_when_there_is_no_key_then_it_says_which_setting_is_missing(self) -> None:
        ended = CliRunner().invoke(main, ["webhook-secret", "acme"])

        assert ended.exit_code == ExitCode.MISUSED
        assert "SLUICE_CALLBACKS_SECRET" in ended.stderr
