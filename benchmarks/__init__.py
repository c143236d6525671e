"""Costs and looks of ltx2rt: each module is run as `python -m benchmarks.NAME`."""
