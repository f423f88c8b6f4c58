"""The engine of one model: prepare a request, admit it, schedule its seqs, run batches, answer.

A `Request` becomes an `EngineRequest` (prepare.py), which becomes a `Job` of the `Dispatcher`, whose batches the `Lanes` run.
Knows nothing of HTTP and of other processes.
"""
