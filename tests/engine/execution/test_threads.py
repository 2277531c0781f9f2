"""Threads that spin only for a moment: said in time, and not against the operator's word."""

import subprocess
import sys

CODE = """
import os
from sluice.engine.execution.threads import limit_spinning
in_time = limit_spinning()
import torch
print(in_time, limit_spinning(), os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


def say(**environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_spinning_is_limited_if_it_is_said_before_torch() -> None:
    assert say() == "True False None 5000"


def test_what_the_operator_set_stays() -> None:
    assert say(OMP_WAIT_POLICY="active") == "True False active None"
    assert say(GOMP_SPINCOUNT="500") == "True False None 500"
