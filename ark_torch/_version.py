"""The package's version, read by setup.py, CMakeLists.txt and ark_torch.__version__."""

__version__ = "0.1.0"
