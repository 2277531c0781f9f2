"""lm-eval and sentence-transformers: what they say of a model that they load themselves, or ask a gateway for.

drive.py loaded FOLDER QUESTIONS      log-likelihoods of lm-eval's `hf` model
drive.py served FOLDER QUESTIONS      those of its `local-completions` model, unmodified
drive.py embed FOLDER TEXTS           vectors of sentence-transformers
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TASK = "choices"


def score(kind: str, folder: str, questions: str) -> None:
    """Print the log-likelihood of each choice of each question, and whether it is greedy."""
    from lm_eval import simple_evaluate

    models = {
        "loaded": ("hf", {"pretrained": folder, "dtype": "float32", "device": "cpu"}),
        "served": (
            "local-completions",
            {
                "model": Path(folder).name,
                "base_url": f"{os.environ.get('OPENAI_BASE_URL')}/completions",
                "tokenizer": folder,
                "num_concurrent": 4,
                "add_bos_token": True,
            },
        ),
    }
    model, arguments = models[kind]
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": questions}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    found = simple_evaluate(model=model, model_args=arguments, tasks=[task], batch_size=1, log_samples=True)
    samples = sorted(found["samples"][TASK], key=lambda sample: sample["doc_id"])
    scores = [[[float(value), bool(is_greedy)] for [[value, is_greedy]] in sample["resps"]] for sample in samples]
    print(json.dumps({"scores": scores}))


def embed(folder: str, texts: str) -> None:
    """Print the vector of each text."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": "float32"})
    print(json.dumps({"vectors": model.encode(json.loads(Path(texts).read_text())).tolist()}))


what, *arguments = sys.argv[1:]
if what == "embed":
    embed(*arguments)
else:
    score(what, *arguments)
