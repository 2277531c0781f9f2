"""Creation of the small model in `worker/small_model`: corpus, tokenizer, training, measurement."""
