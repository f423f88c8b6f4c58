"""Tokenization of texts.

Turns texts and resolved parameters into a list of `Seq`: texts (`tokenizer.py`), pairs (`pairs.py`), chat templates of
rerankers (`template.py`), chunks of long texts and late chunking (`chunking.py`). Checks and truncates its input on the way.
`tokenizer.Tokenizer` is the entry point. Knows nothing of requests, batches, queues or the model's weights.
"""
