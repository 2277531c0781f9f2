"""llama-cpp-python with its LlamaPromptLookupDecoding. A logits processor gives the next token of the output.

The largest n-gram is its default, two tokens.
"""

from collections.abc import Sequence
from itertools import islice

import numpy
from llama_cpp import Llama, LogitsProcessorList
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from serve_lookup import Generate, LookupWork


class CountingLlama(Llama):
    """A model that counts its steps."""

    num_steps = 0

    def eval(self, tokens: Sequence[int]) -> None:
        """Compute one step."""
        self.num_steps += 1
        super().eval(tokens)


def open_engine(work: LookupWork) -> Generate:
    """Load the GGUF next to the model's folder."""
    guesses = LlamaPromptLookupDecoding(num_pred_tokens=work.num_guesses) if work.num_guesses else None
    # It keeps the logits of as many tokens as a batch has: a whole job's.
    size = work.max_tokens
    llama = CountingLlama(
        f"{work.model}-{work.weights}.gguf", n_ctx=size, n_batch=size, n_threads=2, n_threads_batch=2,
        draft_model=guesses, verbose=False,
    )  # fmt: skip

    def generate(prompt: list[int], output: list[int]) -> tuple[list[int], int]:
        given = iter(output)

        def force(_: object, logits: numpy.ndarray) -> numpy.ndarray:
            logits[next(given)] = numpy.inf
            return logits

        llama.reset()
        llama.num_steps = 0
        tokens = llama.generate(prompt, temp=0.0, logits_processor=LogitsProcessorList([force]))
        return list(islice(tokens, len(output))), llama.num_steps

    return generate
