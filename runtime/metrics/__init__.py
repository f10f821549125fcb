"""Counters from ranks to Prometheus: encoding, reporting, the table of metrics, and their export."""
