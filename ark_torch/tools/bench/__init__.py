"""Benchmark of the collectives: `ark bench --help`."""
