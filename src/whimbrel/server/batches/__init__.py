"""Batch files: lines of requests to lines of answers, on the command line and as OpenAI's Batch API."""
