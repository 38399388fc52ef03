"""Exceptions that are raised from Python. Failures of collectives come from C++ as PyTorch's own types."""


class IncompatibleTorch(ImportError):
    """This PyTorch is not one that the installed ark_torch was built for; the message holds the command that mends."""


class CompilerNotAvailable(RuntimeError):
    """A region cannot be compiled here: the build or the machine lacks what it takes. The message says what."""


class InvalidOption(ValueError):
    """A mode or option of torch.compile(backend="ark") that is not known, or a value that it does not take."""


class UnsupportedGraph(RuntimeError):
    """Something that ark does not compile, where options={"fallback": False} forbids to hand it to Inductor."""
