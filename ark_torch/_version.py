"""The package's version, read by CMakeLists.txt, the wheel and ark_torch.__version__."""

__version__ = "0.1.0"
