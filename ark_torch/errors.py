"""Exceptions that are raised from Python. Failures of collectives come from C++ as PyTorch's own types."""


class IncompatibleTorch(ImportError):
    """This PyTorch is not one that the installed ark_torch was built for; the message holds the command that mends."""


class CompilerNotAvailable(RuntimeError):
    """torch.compile(backend="ark") was asked of a version that has no compiler yet."""
