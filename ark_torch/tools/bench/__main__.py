import sys

from ark_torch.tools.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
