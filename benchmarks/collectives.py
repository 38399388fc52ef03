"""The collectives of ark against Gloo and Open MPI; results go to benchmarks/results, whatever folder this runs from.

    python benchmarks/collectives.py [--quick] [--ops all_reduce] [--ranks 2,4] ...

The same as `ark bench --developer`, where the code lives so that it comes with the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ark_torch.tools.bench.cli import main

if __name__ == "__main__":
    results = Path(__file__).resolve().parent / "results"
    sys.exit(main(["--developer", "--output", str(results), *sys.argv[1:]]))
