"""Compares ark's collectives with Gloo and Open MPI. Results go to benchmarks/results from any working folder.

    python benchmarks/collectives.py [--quick] [--ops all_reduce] [--ranks 2,4] ...

Same as `ark bench --developer`. The code is in the package, so that it is installed with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ark_torch.tools.bench.cli import main

if __name__ == "__main__":
    results = Path(__file__).resolve().parent / "results"
    sys.exit(main(["--developer", "--output", str(results), *sys.argv[1:]]))
