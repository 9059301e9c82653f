"""Rows and their checks, splits, chat templates, tokenizer, batches, and the data of the built-in task."""
