"""The process of a trial: reads sizes and a device, then tasks, a line of JSON each; answers each with a line.

An answer is empty, or names the problem. After an error the process ends: its device may be lost.
"""

import gc
import json
import os
import sys
from typing import TextIO

import torch

from sluice.kernels.chain import set_deterministic
from sluice.kernels.trial.cases import cases_of
from sluice.kernels.trial.compare import WrongResult
from sluice.kernels.trial.sizes import ModelSizes

SEED = 7


def _serve(requests: TextIO, answers: TextIO) -> None:
    given = json.loads(requests.readline())
    device = torch.device(given["device"])
    sizes = ModelSizes.of(given["sizes"])
    set_deterministic(sizes.is_deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    torch.ones(1, device=device)
    _answer(answers, {"ready": True})
    for line in requests:
        operation, number = json.loads(line)
        answer, is_well = _tried(operation, number, sizes, device)
        _answer(answers, answer)
        if not is_well:
            return


def _tried(operation: str, number: int, sizes: ModelSizes, device: torch.device) -> tuple[dict[str, str], bool]:
    """Run one case; return the answer, and whether the process can continue."""
    try:
        torch.manual_seed(SEED + number)
        cases_of(operation, sizes, device)[number]()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except WrongResult as error:
        return {"problem": str(error)}, True
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
        return {"untried": "no memory"}, True
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is the answer
        return {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:300]}, False
    return {}, True


def _answer(answers: TextIO, answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    """Serve on the standard streams; libraries' output goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers, torch.inference_mode():
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
