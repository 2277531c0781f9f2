"""Model folders of random weights in one of `gpu_models.SHAPES`, for other engines and worker processes."""

# torch's and transformers' types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch

from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.scale import Scale
from benchmarks.service.words import save_words

MAX_MODEL_LEN = 4096


def shape_of(scale: Scale) -> str:
    """The shape that whole engines are measured with."""
    return "toy" if scale.is_toy else "0.6B"


@contextmanager
def random_folder(scale: Scale, *, has_tokenizer: bool = False) -> Generator[Path]:
    """Create a folder with random weights, in the dtype that speed is measured in; every token is a word."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options = SHAPES[shape_of(scale)] | {"max_position_embeddings": MAX_MODEL_LEN}
    config = AutoConfig.for_model(str(options.pop("model_type")), **options)
    with tempfile.TemporaryDirectory(prefix="sluice-gpu-") as folder:
        # Not in inference mode, which other engines' threads are not in.
        with torch.inference_mode(False), torch.device(scale.device):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=scale.dtype)
            model.save_pretrained(folder)
        del model
        if has_tokenizer:
            save_words(Path(folder), cast("int", options["vocab_size"]))
        yield Path(folder)
