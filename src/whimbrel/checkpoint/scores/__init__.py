"""Readers of classifiers, cross-encoders and rerankers.

`classifiers.py` reads classification heads, `llm_rerankers.py` language models that score pairs through a template, and
`step_rewards.py` a process reward model. Knows nothing of how pairs are encoded.
"""
