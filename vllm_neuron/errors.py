"""One family of errors. The message of each says what was wrong, where, what is accepted, and what to do.

Each class has a stable ``code`` of its own; messages may change between releases. Classes that are defined beside what
raises them derive from these. ``docs/reference/errors.md`` lists all of them.
"""

from __future__ import annotations

from typing import ClassVar


class NeuronError(Exception):
    """Base of every error that this package raises on purpose. The command line prints it as one line."""

    code: ClassVar[str] = "neuron-error"


class ConfigError(NeuronError, ValueError):
    """A variable, an option, a model folder or a combination of them can't be used. The command line exits 2."""

    code = "configuration"


class UnsupportedError(NeuronError, NotImplementedError):
    """A feature of vLLM or of a model that this platform does not serve."""

    code = "unsupported"


class UnsupportedOpError(NeuronError, NotImplementedError):
    """An operator, or a form of one, that the lowering does not cover. Names the operator and its shapes."""

    code = "unsupported-operator"


class CaptureError(NeuronError, RuntimeError):
    """A graph could not be captured soundly: a baked-in tensor, an undeclared mutation, a non-ATen operator."""

    code = "capture"


class CompileError(NeuronError, RuntimeError):
    """The device compiler failed. Carries the diagnosis and the path of its log."""

    code = "compile"


class CompilerMemoryError(CompileError):
    """The compiler was killed, or gave up, because this host's memory was too small for it."""

    code = "compiler-memory"


class CacheError(NeuronError, RuntimeError):
    """A tier could not do what it had to: an unfinished entry was to be promoted, a publish failed."""

    code = "cache"


class DamagedEntryError(CacheError):
    """An entry's files are not what its metadata says, or its metadata can't be read."""

    code = "damaged-entry"


class CacheMissError(NeuronError, RuntimeError):
    """Strict mode, and a graph is in no tier."""

    code = "cache-miss"


class IncompatibleHostError(NeuronError, RuntimeError):
    """An artifact needs a CPU feature, or memory, that this host does not have."""

    code = "incompatible-host"


class EngineFailedError(NeuronError, RuntimeError):
    """A step of the engine failed before, so that its state can't be trusted."""

    code = "engine-failed"
