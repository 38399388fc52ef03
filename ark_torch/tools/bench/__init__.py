"""Benchmark of the collectives: `python -m ark_torch.tools.bench --help`."""
