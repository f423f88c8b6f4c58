"""The command `whimbrel top`: a live view of servers, from their metrics."""
