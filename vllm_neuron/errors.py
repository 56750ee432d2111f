"""One family of errors. The message of each says what was wrong, where, what is accepted, and what to do."""

from __future__ import annotations


class NeuronError(Exception):
    """Base of every error that this package raises on purpose. The command line prints it as one line."""


class ConfigError(NeuronError, ValueError):
    """A variable, an option, a model folder or a combination of them can't be used. The command line exits 2."""


class UnsupportedError(NeuronError, NotImplementedError):
    """A feature of vLLM or of a model that this platform does not serve."""


class UnsupportedOpError(NeuronError, NotImplementedError):
    """An operator, or a form of one, that the lowering does not cover. Names the operator and its shapes."""


class CaptureError(NeuronError, RuntimeError):
    """A graph could not be captured soundly: a baked-in tensor, an undeclared mutation, a non-ATen operator."""


class CompileError(NeuronError, RuntimeError):
    """The device compiler failed. Carries the diagnosis and the path of its log."""


class CompilerMemoryError(CompileError):
    """The compiler was killed, or gave up, because this host's memory was too small for it."""


class CacheError(NeuronError, RuntimeError):
    """A tier could not do what it had to: an unfinished entry was to be promoted, a publish failed."""


class DamagedEntryError(CacheError):
    """An entry's files are not what its metadata says, or its metadata can't be read."""


class CacheMissError(NeuronError, RuntimeError):
    """Strict mode, and a graph is in no tier."""


class IncompatibleHostError(NeuronError, RuntimeError):
    """An artifact needs a CPU feature, or memory, that this host does not have."""


class EngineFailedError(NeuronError, RuntimeError):
    """A step of the engine failed before, so that its state can't be trusted."""
