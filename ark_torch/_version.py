"""The version of the package: setup.py, CMakeLists.txt and ark_torch.__version__ read it here."""

__version__ = "0.1.0"
