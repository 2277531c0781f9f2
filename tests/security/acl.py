"""The ACL rules that docs/explanation/security.md gives people to copy, set on a real server."""

import re
from pathlib import Path

from tests.servers import Flavor, RedisServer

PAGE = Path(__file__).parent.parent.parent / "docs/explanation/security.md"
QUEUE = "chat"
PASSWORD = "letmein"


def rules_for(flavor: Flavor) -> dict[str, list[str]]:
    """User -> the words of its rule, as the page has them for this server."""
    new, old = re.findall(r"^```\n(acme-submit .*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = (old if flavor == "redis-6.2" else new).replace("PASSWORD", PASSWORD).splitlines()
    # A rule in parentheses is one argument of ACL SETUSER.
    words = [re.findall(r"\([^)]*\)|\S+", line) for line in lines]
    return {user: rest for user, *rest in words}


def set_users(server: RedisServer) -> None:
    """Make every user of the page."""
    with server.client() as client:
        for user, rule in rules_for(server.flavor).items():
            client.execute_command("ACL", "SETUSER", user, *rule)


def url_of(server: RedisServer, user: str) -> str:
    """The server's URL for one of them."""
    return f"unix://{user}:{PASSWORD}@{server.socket_path}"
