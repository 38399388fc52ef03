"""PEP 517 backend: setuptools' own, plus the PyTorch of the environment that the package is built for.

An isolated build sees only its build requirements, and the extension must be compiled against the very PyTorch
that will load it, so PyTorch cannot be a build requirement (pip would fetch another one). pip runs the hooks with
the target environment's interpreter: its site-packages are put at the *end* of the path, so that setuptools and
ninja still come from the isolated environment. uv runs them with an interpreter of its own: --no-build-isolation.
"""

import sys
import sysconfig

for _name in ("purelib", "platlib"):
    _path = sysconfig.get_path(_name)
    if _path and _path not in sys.path:
        sys.path.append(_path)

from setuptools.build_meta import *  # noqa: E402, F403
