"""Whether there are native kernels on this CPU to be measured."""

import shutil
import subprocess
import sys

from sluice.kernels.compiler import COMPILERS
from sluice.kernels.native import load_best


def require_native_kernels() -> None:
    """Exit with a sentence if there is a C compiler and it fails: PyTorch's operators would be measured in silence."""
    if not any(map(shutil.which, COMPILERS)):
        return
    try:
        load_best()
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error).splitlines()[0]
        sys.exit(
            f"There are no native kernels, and PyTorch's operators, seven times slower, are not measured: {reason}"
        )
