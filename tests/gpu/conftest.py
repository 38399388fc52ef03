"""These tests run where there is a GPU, all of them, and are not collected elsewhere: none skips itself."""

from ark_torch import _C

collect_ignore_glob = [] if _C._has_cuda_driver() else ["test_*.py"]
