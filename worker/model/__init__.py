"""Load a model and turn jobs into engine requests: chat template, tokenizer, translation."""
