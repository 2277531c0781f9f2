"""Hosts on one machine whose links are cut, slowed and lossy; `tests.chaos.checker` checks what the queue kept."""
