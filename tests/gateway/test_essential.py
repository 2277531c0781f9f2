"""Tasks of the gateway whose end would be missed in silence."""

import subprocess
import sys

PROGRAM = """
import asyncio, logging
from sluice.gateway.essential import essential_task

async def fail():
    raise RuntimeError("injected")

async def main():
    essential_task({work}, "some task")
    await asyncio.sleep({rest_s})

logging.basicConfig()
asyncio.run(main())
"""


class TestGivenAnEssentialTask:
    def test_when_it_fails_then_the_process_ends_with_1_and_its_traceback(self) -> None:
        program = PROGRAM.format(work="fail()", rest_s=60)

        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False, text=True)

        assert ended.returncode == 1
        assert "RuntimeError: injected" in ended.stderr
        assert "Task failed; ending the process" in ended.stderr

    def test_when_it_ends_or_is_cancelled_then_the_process_goes_on(self) -> None:
        for work, rest_s in (("asyncio.sleep(0)", 0.01), ("asyncio.sleep(60)", 0)):
            program = PROGRAM.format(work=work, rest_s=rest_s)

            ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)

            assert ended.returncode == 0
