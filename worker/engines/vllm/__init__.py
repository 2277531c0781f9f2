"""vLLM as a worker's engine: it computes steps that our scheduler plans, and our sampler draws their tokens.

`load.py` prepares a model, `executor.py` turns planned steps into orders (`orders.py`), `sampling.py` draws tokens in
vLLM's workers. Only `core.py` imports vLLM. Why so: docs/decisions/vllm-as-an-executor.md.
"""
