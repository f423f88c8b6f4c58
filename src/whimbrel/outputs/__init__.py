"""Outputs: from requested outputs and their memory layout to the response, by numpy alone.

`requested.py` resolves the outputs of a request, `layout.py` plans where their rows lie, `rows.py` selects the rows of a batch,
and `finishers.py` turns rows into the response. The other modules are the ways of finishing: scores, chunks, pooling, MUVERA.
"""
