"""Evaluation of models on judged collections: retrieval, reranking, measures and their intervals."""
