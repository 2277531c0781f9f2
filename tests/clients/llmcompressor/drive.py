"""LLM Compressor: a small random model in each scheme, and the numbers that its folder stands for.

drive.py FOLDER    writes a folder for each case, and in it `numbers` with each quantized matrix; prints its name
"""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import save_file

with redirect_stdout(sys.stderr):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        AutoModelForCausalLM,
        CompressedTensorsConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

VOCABULARY, LENGTH = 128, 32
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GROUPS = {"group_size": 64, "strategy": "group"}


def weights_alone(**arguments: object) -> dict:
    """Return the groups of a config for weights in integers, activations as they are."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="int", **arguments))
    return {"config_groups": {"group_0": scheme}}


CASES = {
    "w4a16": QuantizationModifier(ignore=["lm_head"], **weights_alone(num_bits=4, **GROUPS)),
    "w4a16-zeros": QuantizationModifier(ignore=["lm_head"], **weights_alone(num_bits=4, symmetric=False, **GROUPS)),
    "w8a16": QuantizationModifier(ignore=["lm_head"], **weights_alone(num_bits=8, strategy="channel")),
    "w8a8": QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    "fp8": QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]),
    "fp8-block": QuantizationModifier(targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"]),
    "gptq": GPTQModifier(ignore=["lm_head"], **weights_alone(num_bits=4, **GROUPS)),
    "gptq-order": GPTQModifier(ignore=["lm_head"], actorder="static", **weights_alone(num_bits=4, **GROUPS)),
}


def texts() -> Dataset:
    """Return random tokens, which calibrate."""
    rows = torch.randint(VOCABULARY, (8, LENGTH)).tolist()
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * LENGTH] * len(rows)})


def write(modifier: QuantizationModifier, plain: Path, folder: Path) -> None:
    """Quantize the model of a folder, save it in another, and read what was saved."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    calibration = {}
    if isinstance(modifier, GPTQModifier):
        # It asks for a tokenizer, and has no use for one: the texts are tokens.
        words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"w": 0}, "w")))
        calibration = {"dataset": texts(), "processor": words, "num_calibration_samples": 8, "max_seq_length": LENGTH}
    oneshot(model=model, recipe=modifier, **calibration)
    model.save_pretrained(folder, save_compressed=True)
    dense = CompressedTensorsConfig(run_compressed=False)
    read = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dense, dtype=torch.float32)
    numbers = {name: tensor for name, tensor in read.state_dict().items() if name.endswith("_proj.weight")}
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, folder / "numbers")


def main(folder: Path) -> None:
    """Write all cases."""
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder / "plain")
    for name, modifier in CASES.items():
        with redirect_stdout(sys.stderr):
            write(modifier, folder / "plain", folder / name)
        print(json.dumps({"name": name}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
