"""Exceptions that are raised from Python. Failures of collectives come from C++ as PyTorch's own types."""


class IncompatibleTorch(ImportError):
    """This PyTorch is not one that the installed ark_torch was built for; the message holds the command that mends."""


class CompileError(RuntimeError):
    """A region cannot be compiled here: the compiler is missing or failed, or the build lacks what it takes.

    The message names the program, the first line of its error, and a remedy. Where options["fallback"] is True (the
    default), the region runs on Inductor instead and the message is logged.
    """


class IndexOutOfRange(IndexError, RuntimeError):
    """An index that a tensor does not have, met inside a compiled region.

    Eager operators disagree about its class (indexing raises IndexError; gather, scatter and one_hot RuntimeError), so
    a handler for either catches it.
    """


class InvalidOption(ValueError):
    """A mode or option of torch.compile(backend="ark") that is not known, or a value that it does not take."""


class UnsupportedGraph(RuntimeError):
    """Something that ark does not compile, where options={"fallback": False} forbids to hand it to Inductor."""
