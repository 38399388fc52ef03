"""Tools run as modules: python -m ark_torch.tools.NAME."""
