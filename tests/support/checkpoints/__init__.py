"""Invented checkpoints: small random weights in the files of published models, and what a reference computes from them."""
