"""Loads a ``.vmfb`` and calls it on torch's own memory: no copy of weights, KV cache or results.

IREE's worker threads do not survive a fork, and neither the device that owns them nor anything loaded on it may be
used or even released in the child. So devices belong to a process id, and a child never lets go of its parent's.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from vllm_neuron.abi import Abi
from vllm_neuron.errors import DamagedEntryError, IncompatibleHostError
from vllm_neuron.host.cpu import usable_cores
from vllm_neuron.runtime.base import BoundCall, check_inputs

ALIGNMENT = 64  # bytes, of any buffer that IREE imports
_DLPACK_CPU = 1


@dataclass(frozen=True)
class _Host:
    """IREE's instance and CPU device in this process."""

    instance: Any
    driver: Any
    device: Any

    def outlive_fork(self) -> None:
        """Makes the parent's device immortal: its release would wait for threads that the child does not have."""
        for handle in (self.driver, self.device):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


@functools.cache
def _host(pid: int) -> _Host:
    from iree.runtime import VmInstance
    from iree.runtime._binding import create_hal_driver, disable_leak_checker
    from iree.runtime.flags import parse_flags

    # One worker per usable core, not pinned: IREE by itself counts the machine's, whatever the quota. It takes no
    # notice of OMP_NUM_THREADS, which is about torch's threads. Whoever sets the topology with IREE's own variable
    # keeps it.
    if "task_topology" not in os.environ.get("IREE_PY_RUNTIME_FLAGS", ""):
        parse_flags(f"--task_topology_group_count={usable_cores()}")
    # Compiled functions live as long as the program, and its end is no time for a report about them.
    disable_leak_checker()
    # The public get_driver caches drivers, over a fork too.
    driver = create_hal_driver("local-task")
    host = _Host(VmInstance(), driver, driver.create_default_device())
    os.register_at_fork(after_in_child=host.outlive_fork)
    return host


def why_not_loaded(artifact: Path) -> str:
    """Why IREE's runtime can't load the module, in its own words; "" where it can. Leaves no threads behind."""
    from iree.runtime import VmContext, VmInstance, VmModule, create_hal_module
    from iree.runtime._binding import create_hal_driver, disable_leak_checker

    disable_leak_checker()
    instance, device = VmInstance(), create_hal_driver("local-sync").create_default_device()
    try:
        module = VmModule.mmap(instance, str(artifact))
        VmContext(instance, [create_hal_module(instance, device), module])
    except (LookupError, RuntimeError, ValueError) as error:
        return next(iter(str(error).splitlines())).rstrip(" ;")
    return ""


class IreeExecutable:
    """The function ``main`` of one artifact, in the process that loads it. See ``runtime.base.Executable``."""

    def __init__(self, artifact: Path, abi: Abi) -> None:
        """Maps the file; no part of it is read before it is needed.

        Raises ``DamagedEntryError`` for a file that is no IREE module with a ``main``, ``IncompatibleHostError`` for
        one that is built for another kind of processor, and ``ValueError`` for a dtype that can't cross the boundary.
        """
        from iree.runtime import VmContext, VmModule, create_hal_module

        for spec in (*abi.inputs, *abi.outputs):
            if spec.torch_dtype.itemsize == 1 and spec.dtype.startswith("float"):
                raise ValueError(f"{artifact}: IREE's runtime can't be handed a tensor {spec}")
        self.abi = abi
        self.artifact = artifact
        self._pid = os.getpid()
        self._host = _host(self._pid)
        try:
            if not artifact.is_file():
                raise ValueError("no such file")
            module = VmModule.mmap(self._host.instance, str(artifact))
            self._main = module.lookup_function("main")
            if self._main is None:
                raise ValueError("it has no function main")
            hal = create_hal_module(self._host.instance, self._host.device)
            self._context = VmContext(self._host.instance, [hal, module])
        except (LookupError, RuntimeError, ValueError) as error:
            kind = IncompatibleHostError if "INCOMPATIBLE" in str(error) else DamagedEntryError
            raise kind(f"{artifact} can't be loaded: {error}") from error

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``runtime.base.Executable``."""
        check_inputs(self.abi, inputs)
        given = [_plain(tensor) for tensor in inputs]
        staged = [tensor if importable(tensor) else _aligned_copy(tensor) for tensor in given]
        outputs = self._invoke(self._import(staged))
        self._copy_back(outputs, given)
        return self._results(outputs, frozenset(tensor.data_ptr() for tensor in staged))

    def bind(self, inputs: Sequence[torch.Tensor]) -> BoundCall:
        """See ``runtime.base.Executable``."""
        check_inputs(self.abi, inputs)
        for index, tensor in enumerate(inputs):
            if not importable(tensor):
                raise ValueError(
                    f"input {index} ({self.abi.inputs[index]}) can't be bound: it must be contiguous, and start at a "
                    f"multiple of {ALIGNMENT} bytes; its strides are {tensor.stride()}, "
                    f"and it starts at a multiple and {tensor.data_ptr() % ALIGNMENT} bytes"
                )
        return _Bound(self, [_plain(tensor) for tensor in inputs])

    def _import(self, tensors: Sequence[torch.Tensor]) -> Any:
        """IREE's list of arguments over the tensors' own memory, which it keeps alive."""
        from iree.runtime import VmVariantList

        arguments = VmVariantList(len(tensors))
        for tensor in tensors:
            arguments.push_ref(self._host.device.from_dlpack_capsule(to_dlpack(tensor)).ref)
        return arguments

    def _invoke(self, arguments: Any) -> Any:
        from iree.runtime import VmVariantList

        if os.getpid() != self._pid:
            raise RuntimeError(f"{self.artifact} was loaded before a fork, by process {self._pid}, and can be called "
                               "in that one only. Load it again in this process")  # fmt: skip
        outputs = VmVariantList(len(self.abi.outputs))
        self._context.invoke(self._main, arguments, outputs)
        return outputs

    def _copy_back(self, outputs: Any, inputs: Sequence[torch.Tensor]) -> bool:
        """Gives mutated inputs their new values. False if there was one that the call had not written in place."""
        in_place = True
        for output, index in enumerate(self.abi.aliases):
            changed = self._tensor(outputs, output)
            if changed.data_ptr() != inputs[index].data_ptr():
                in_place = False
                inputs[index].copy_(changed)
        return in_place

    def _tensor(self, outputs: Any, index: int) -> torch.Tensor:
        """Output ``index`` over IREE's own memory, which the tensor keeps alive."""
        from iree.runtime import HalBufferView

        view = outputs.get_as_object(index, HalBufferView)
        tensor: torch.Tensor = from_dlpack(self._host.device.create_dlpack_capsule(view, _DLPACK_CPU, 0))
        return tensor

    def _results(self, outputs: Any, inputs: frozenset[int]) -> list[torch.Tensor]:
        """The outputs that are no mutated inputs. IREE may give out one buffer twice, or an input: these are copied."""
        results: list[torch.Tensor] = []
        taken: set[int] = set()
        for index in range(len(self.abi.aliases), len(self.abi.outputs)):
            result = self._tensor(outputs, index)
            address = result.data_ptr()
            results.append(result.clone() if address in inputs or address in taken else result)
            taken.add(address)
        return results


class _Bound:
    """One list of arguments, made once. Making it costs more than most calls do."""

    def __init__(self, executable: IreeExecutable, inputs: list[torch.Tensor]) -> None:
        self._executable = executable
        self._inputs = inputs
        self._addresses = frozenset(tensor.data_ptr() for tensor in inputs)
        self._arguments = executable._import(inputs)
        self._in_place = False

    def __call__(self) -> list[torch.Tensor]:
        outputs = self._executable._invoke(self._arguments)
        # Whether an output is written in place is settled when the module is compiled: one look is enough.
        if not self._in_place:
            self._in_place = self._executable._copy_back(outputs, self._inputs)
        return self._executable._results(outputs, self._addresses)


def importable(tensor: torch.Tensor) -> bool:
    """True if IREE can use the tensor's memory as it is."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its part in autograd, which would forbid writing to it."""
    return tensor.detach() if tensor.requires_grad else tensor


def _aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    assert importable(copy), "torch's allocator aligns to 64 bytes"
    return copy.copy_(tensor)
