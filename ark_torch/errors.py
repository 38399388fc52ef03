"""Exceptions raised from Python. Failures of collectives come from C++ as PyTorch's own types."""


class IncompatibleTorch(ImportError):
    """The installed ark_torch was not built for this PyTorch; the message contains the command that fixes it."""


class CompileError(RuntimeError):
    """A region cannot be compiled here: the compiler is missing or failed, or the build lacks a required part.

    The message names the program, the first line of its error, and a remedy. With options["fallback"] set to True (the
    default), the region runs on Inductor instead and the message is logged.
    """


class IndexOutOfRange(IndexError, RuntimeError):
    """An index out of a tensor's range, found inside a compiled region.

    Eager operators disagree about the class (indexing raises IndexError; gather, scatter and one_hot RuntimeError), so
    a handler for either catches this one.
    """


class InvalidOption(ValueError):
    """An unknown mode or option of torch.compile(backend="ark"), or an invalid value of an option."""


class UnsupportedGraph(RuntimeError):
    """ark cannot compile part of a graph, and options={"fallback": False} forbids the fallback to Inductor."""
