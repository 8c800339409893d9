"""An open-loop load generator for any OpenAI-compatible server: requests leave when due, answered or not.

`workload.py` says what is asked for and when, `client.py` asks, `summary.py` makes figures of the records,
`report.py` pages and pictures of the figures. `scenarios.py` starts a small fleet of its own and disturbs it.
"""
