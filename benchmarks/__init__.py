"""What ltx2rt costs, and what it looks like: each module is run as `python -m benchmarks.NAME`."""
