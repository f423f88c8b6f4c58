"""Vocabulary of the package: requests, sequences, batches, results, cards and plans.

Plain frozen data, without threads, clock, I/O or torch.
"""
