"""Stores: the output of a bulk run into a table of LanceDB or PostgreSQL, a collection of Qdrant, an index of OpenSearch."""

from whimbrel.stores.kinds import Stored, store

__all__ = ["Stored", "store"]
