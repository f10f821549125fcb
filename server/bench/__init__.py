"""Load tools: what requests are made of, when they leave, what came back, and what it adds up to.

Not flags (server/cli/tools.py). Pure: datasets, arrivals, records, statistics, sse, dialect. I/O: client, load, scrape,
online, offline, plot, report and chosen (from flags). Importing this package loads nothing.
"""
