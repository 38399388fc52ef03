"""ark_torch: PyTorch's collectives over shared memory, `torch.distributed.init_process_group("ark")`.

Importing this package is not needed (PyTorch finds the backend by its entry points) and does no more than check that
PyTorch and the extension belong together, and register the backend; the extension is loaded with the first group.
"""

from __future__ import annotations

from ark_torch import _autoload
from ark_torch._version import __version__

_autoload.on_import()

__all__ = ["__version__"]
