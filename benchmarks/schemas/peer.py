"""Compile schemas with xgrammar, vLLM's default decoder: a program of its own, since one may hang or crash it.

It reads a JSON list of schemas from the file named first, begins at the number named second, and prints a line for
each: a reason, or nothing.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Compile them in turn."""
    import xgrammar

    tokens = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    for text in json.loads(Path(sys.argv[1]).read_text())[int(sys.argv[2]) :]:
        reason = ""
        try:
            compiler.compile_json_schema(text)
        except Exception as error:  # noqa: BLE001 - whatever it is, it does not compile
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main()
