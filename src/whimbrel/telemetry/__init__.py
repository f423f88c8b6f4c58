"""Telemetry: events of requests, and the metrics, logs and spans made of them."""
