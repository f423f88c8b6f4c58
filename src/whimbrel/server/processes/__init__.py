"""Processes of a server: a supervisor, HTTP workers, and an engine process for each replica of a model (ARCHITECTURE.md)."""
