"""The engine of one model: prepare a request, admit it, schedule its seqs, run batches, answer.

A `Request` becomes an `EngineRequest` (prepare.py), which becomes a `Job` of the `Dispatcher`. `Lanes` take batches from it,
launch them on a runner, collect them and deliver the rows to the finishers of the jobs. Knows nothing of HTTP and of other
processes.
"""
