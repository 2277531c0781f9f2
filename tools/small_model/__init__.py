"""How the small model that ships in `worker/small_model` is made: corpus, tokenizer, training, measurement."""
