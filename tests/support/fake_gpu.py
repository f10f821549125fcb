"""A GPU that is not there: tensors of device `cuda` without memory, launches and calls of the driver that only note.

Numbers are not right: what comes to the host is zeros, and True of bools. What is checked is where things lie. An
operation that mixes a GPU's tensor with the host's is refused by torch, a launch that gets a tensor of the host by what
stands here, and so is, while a graph is captured, all that a real capture does not survive: copies between host and
device, looks at numbers, memory of the host. Tensors of the host alone are real. One thread at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec, patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from moewe.native.gpu import TARGETS, GpuTarget, Launch
from moewe.native.gpu.compiling import launch_key
from moewe.native.gpu.signature import ALIGNMENT
from moewe.runtime.ranks import own_gpu
from moewe.runtime.ranks.own_gpu import runs_kernels

TARGET: GpuTarget = TARGETS[90]
MEMORY_BYTES = 8 << 30
DEVICE = torch.device("cuda", 1)  # of a rank; what forgets the number is on the first GPU
_CUDA, _META = 1, 14  # c10::DeviceType
_ROOM = 1 << 40  # addresses of a tensor's memory; more than any has

# Arguments that kernels read by strides which they are told, or know: a latent's V lies in its K.
STRIDED = {("decode_kernel", "v"), ("prefill_kernel", "v"), ("heads_kernel", "qkv"), ("streamed_kernel", "x"),
           ("persistent_kernel", "x")}  # fmt: skip
_WAITING = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
# In inference mode torch leaves the first two whole, and its fakes would find the second answer to one in their cache.
_ASKING = ("is_nonzero", "item", "_local_scalar_dense")
# What not every version of torch does with floats of eight bits on a GPU; on a CPU it may.
_NOT_OF_EIGHT_BITS = ("index", "index_select", "index_copy_", "index_put_", "index_fill_", "gather", "scatter",
                      "scatter_", "masked_fill", "masked_fill_", "where", "mul", "add", "roll", "flip")  # fmt: skip


class FakeGpuError(AssertionError):
    """A real GPU, or the capture of a graph, would refuse this."""


class FakeGpu(FakeTensorMode):
    """What a test looks at.

    Attributes:
        launches: the key of every launch, in order: what machine code it needs (`launch_key`).
        captured: which of them, from one to behind another, each graph was captured from.
        waits: why the host waited for the device, in order.
        pageable: what read memory of the host that is not pinned, in order: behind all that the device was given.
        capturing: a graph is being captured.
        spoilt: which captures, counted from 0, the driver gives up, so that their end throws.
        recording: pools for which the allocator believes a capture to be under way.
        released: pools that were given back without a graph, in order.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.launches: list[str] = []
        self.captured: list[tuple[int, int]] = []
        self.waits: list[str] = []
        self.capturing, self._began = False, 0
        self.spoilt: set[int] = set()
        self.recording: set[tuple[int, int]] = set()
        self.released: list[tuple[int, int]] = []
        self._num_pools, self._num_begun = 0, 0
        self._pool = (0, 0)
        self.pageable: list[str] = []
        self._pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no other memory gets their keys
        self._addresses: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        moves = name in ("to", "_to_copy")
        devices = [kwargs.get("device"), *(args if moves else ())]
        if not any(map(_on_gpu, devices)) and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if kwargs.pop("pin_memory", False):
                self._refuse_capture("pinned memory")
                storage = (made := func(*args, **kwargs)).untyped_storage()
                self._pinned[storage._cdata] = storage
                return made
            return func(*args, **kwargs)
        if moves:
            names = [argument.name for argument in func._schema.arguments]
            return self._moved(args[0], **dict(zip(names[1:], args[1:])) | kwargs)
        if name in _ASKING:
            self._wait("item")
            return args[0].numbers.item() if hasattr(args[0], "numbers") else args[0].dtype == torch.bool or 0
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return self._bring(args[1], args[0], waits=not any(args[2:]))
        for tensor in tensors:
            if tensor.dim() and not isinstance(tensor, FakeTensor):
                self._refuse_capture(f"{name} of a tensor of the host")
                self._note_pageable(tensor, name)
        if name in _NOT_OF_EIGHT_BITS and any(t.is_floating_point() and t.itemsize == 1 for t in tensors):
            raise FakeGpuError(f"{name} of floats of eight bits on a GPU")
        indexes = args[1] if name in ("index", "index_put_") else ()
        masks = [each for each in indexes if each is not None and each.dtype == torch.bool]
        if name in _WAITING or masks:
            self._wait(name)
        if name == "nonzero":  # nothing is
            return self._made((0, args[0].dim()), torch.int64)
        if name == "index" and masks:
            assert len(indexes) == 1, "a mask alone"
            return self._made((0, *args[0].shape[masks[0].dim() :]), args[0].dtype)
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if name == "searchsorted":
            made.last_on_host = args[0].shape[-1]  # so that bounds of something sorted cover all of it
        if name == "select" and hasattr(args[0], "numbers"):
            made.numbers = func(args[0].numbers, *args[1:], **kwargs)
        return made

    def _moved(
        self, source: torch.Tensor, device: Any = None, dtype: Any = None, other: Any = None, copy: bool = False,
        non_blocking: bool = False, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Do what `Tensor.to` does; within inference mode torch leaves it whole."""
        device = torch.device(source.device if device is None else device)
        dtype = dtype or source.dtype
        if _on_gpu(device) == _on_gpu(source.device) and dtype == source.dtype and not copy:
            return source
        if not _on_gpu(device):
            return self._bring(source, torch.empty(source.shape, dtype=dtype), waits=not non_blocking)
        made = self._made(source.shape, dtype, torch.empty_like(source, device="meta").stride())
        if not isinstance(source, FakeTensor):
            self._refuse_capture("a copy from the host")
            self._note_pageable(source, "to")
            if not non_blocking:
                self.waits.append("copy from the host")
            made.numbers = source.to(dtype)  # type: ignore[attr-defined]
        return made

    def _made(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        strides = torch.empty(shape, device="meta").stride() if strides is None else strides
        make, kind = torch.ops.aten.empty_strided.default, {"dtype": dtype, "device": DEVICE}
        made: torch.Tensor = super().__torch_dispatch__(make, (), (shape, strides), kind)
        return made

    def address(self, tensor: torch.Tensor) -> int:
        """Return where `tensor` begins: as torch's allocator does it, memory begins at multiples of 512 bytes."""
        storage = tensor.untyped_storage()
        base, _ = self._addresses.setdefault(storage._cdata, (_ROOM * (1 + len(self._addresses)), storage))
        return base + tensor.storage_offset() * tensor.element_size()

    def launch(self, launch: Launch) -> None:
        """Stand in for `Launch.run`."""
        for name, value in launch.arguments.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not isinstance(value, FakeTensor) or value.device != DEVICE:
                raise FakeGpuError(f"{launch.name} gets {name} on {value.device}")
            if not value.is_contiguous() and (launch.name, name) not in STRIDED:
                raise FakeGpuError(f"{launch.name} gets {name} with strides {value.stride()} of {tuple(value.shape)}")
            if self.address(value) % ALIGNMENT:
                raise FakeGpuError(f"{launch.name} gets {name} at an odd address, which is another form of the kernel")
        if any(number > most for number, most in zip(launch.grid, (2**31 - 1, 65535, 65535))):
            raise FakeGpuError(f"{launch.name} has a grid of {launch.grid}")
        if all(launch.grid):
            self.launches.append(launch_key(launch, TARGET))

    def new_pool(self) -> tuple[int, int]:
        """Stand in for `torch.cuda.graph_pool_handle`."""
        self._num_pools += 1
        return 0, self._num_pools

    def begin_capture(self, pool: tuple[int, int], **_: Any) -> None:
        """Stand in for `CUDAGraph.capture_begin`."""
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.add(pool)
        self._num_begun += 1
        self.capturing, self._began, self._pool = True, len(self.launches), pool

    def end_capture(self) -> None:
        """Stand in for `CUDAGraph.capture_end`."""
        if not self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is not capturing")
        self.capturing = False
        if self._num_begun - 1 in self.spoilt:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.end_recording(DEVICE.index, self._pool)
        self.captured.append((self._began, len(self.launches)))

    def end_recording(self, device: int, pool: tuple[int, int]) -> None:
        """Stand in for `torch._C._cuda_endAllocateToPool`."""
        if device != DEVICE.index or pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        """Stand in for `torch._C._cuda_releasePool`."""
        assert device == DEVICE.index and pool not in self.recording, "a capture is under way"
        self.released.append(pool)

    def _bring(self, source: torch.Tensor, place: torch.Tensor, *, waits: bool) -> torch.Tensor:
        self._refuse_capture("a copy to the host")
        if waits:
            self.waits.append("copy")
        place.fill_(source.dtype == torch.bool)
        if hasattr(source, "last_on_host"):
            place[..., -1] = source.last_on_host
        return place

    def _note_pageable(self, source: torch.Tensor, name: str) -> None:
        if source.untyped_storage()._cdata not in self._pinned:
            self.pageable.append(f"{name}: {tuple(source.shape)} {source.dtype}")

    def _wait(self, name: str) -> None:
        self._refuse_capture(name)
        self.waits.append(name)

    def _refuse_capture(self, what: str) -> None:
        if self.capturing:
            raise FakeGpuError(f"{what} while a graph is captured")


def _on_gpu(device: object) -> bool:
    """Tell whether this is the GPU; without a number the borrowed guard (see below) calls it `meta`."""
    return isinstance(device, str | torch.device) and torch.device(device).type in ("cuda", "meta")


def _guard_nothing() -> None:
    """Let operators switch to a GPU where torch was built without: to them it is a device that needs no switching.

    Builds for GPUs do so themselves within a `FakeTensorMode`, where there is none.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_CUDA] or guards[_META]


@contextmanager
def fake_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeGpu]:
    """Let torch and launches believe in an H200, in this thread, or in something else with as much of all."""
    _guard_nothing()
    gpu = FakeGpu()
    properties = SimpleNamespace(
        name="NVIDIA H200", major=capability[0], minor=capability[1], multi_processor_count=TARGET.num_sms,
        total_memory=MEMORY_BYTES, shared_memory_per_block_optin=TARGET.shared_bytes,
        uuid="00000000-0000-0000-0000-000000000000",
    )  # fmt: skip
    answers: dict[str, Any] = {
        "current_device": DEVICE.index, "device_count": 2, "set_device": None, "synchronize": None,
        "mem_get_info": (MEMORY_BYTES // 2, MEMORY_BYTES), "get_device_properties": properties,
        "get_device_capability": capability,
    }  # fmt: skip
    stream = create_autospec(torch.cuda.Stream, instance=True)
    made = {name: create_autospec(getattr(torch.cuda, name), return_value=value) for name, value in answers.items()}
    graph, event = create_autospec(torch.cuda.CUDAGraph), create_autospec(torch.cuda.Event)
    graph.return_value.capture_begin.side_effect = gpu.begin_capture
    graph.return_value.capture_end.side_effect = gpu.end_capture
    event.return_value.elapsed_time.return_value = 1.0
    made |= {"Stream": create_autospec(torch.cuda.Stream, return_value=stream), "CUDAGraph": graph, "Event": event}
    made["current_stream"] = create_autospec(torch.cuda.current_stream, return_value=stream)
    made["stream"] = create_autospec(torch.cuda.stream)
    made["graph_pool_handle"] = create_autospec(torch.cuda.graph_pool_handle, side_effect=gpu.new_pool)
    runs_kernels.cache_clear()
    with ExitStack() as stack:
        stack.callback(runs_kernels.cache_clear)
        for name, value in made.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch._C, "_cuda_endAllocateToPool", gpu.end_recording, create=True))
        stack.enter_context(patch.object(torch._C, "_cuda_releasePool", gpu.release, create=True))
        stack.enter_context(patch.object(own_gpu, "start_driver", create_autospec(own_gpu.start_driver)))
        stack.enter_context(patch.object(Launch, "run", lambda launch: gpu.launch(launch)))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda tensor: gpu.address(tensor)))
        stack.enter_context(gpu)
        yield gpu
