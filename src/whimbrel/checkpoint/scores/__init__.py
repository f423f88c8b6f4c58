"""Readers of scores: classifiers, cross-encoders and LLM rerankers."""
