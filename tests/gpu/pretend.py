"""A pretended GPU: tensors whose device is `cuda`, and whose numbers a CPU computes, or nobody.

Within `Gpu().present()` torch finds a GPU. Every operation on its tensors comes to `Gpu.run`, which fails
where CUDA would, counts what makes the host wait, and records what is multiplied, converted and held.

With `numbers=False`, tensors of floating types have a shape alone: they are on the device `meta`, so that an
update of eight billion weights takes a minute and no memory. Whoever reads such a number reads 1. Whole
numbers and masks are real; those that are made of floats are what they would be if all of these were 1.

It needs the library of stub.cpp, loaded before torch: `conftest.py` starts processes that have it.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch._dynamo  # it looks at the functions of torch.cuda once, and must see torch's own
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten: Any = torch.ops.aten
GPU = torch.device("cuda", 0)
MEMORY = 80 * 10**9
OURS, TORCH = str(Path(__file__).parents[2] / "rlhf_tasks"), str(Path(torch.__file__).parent)
CPU_ATTENTION, FUSED = F.scaled_dot_product_attention, aten._scaled_dot_product_flash_attention_for_cpu
FACTORS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""What multiplies two matrices, and which argument is the first of them."""
QUERIES = {FUSED: (0, 2), aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5)}
"""Attention: which argument is the query, before the keys, and how many products of their size it takes."""
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
WAITING = (
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave),
)
"""What the host cannot do before the GPU is done: a number is read, or a shape depends on numbers."""


class Place(NamedTuple):
    """A line that asks the GPU for something."""

    ours: str
    """`FILE FUNCTION`, the innermost in rlhf_tasks; empty in a backward pass, which has its own thread."""
    line: int
    library: str
    """`FILE FUNCTION` of the library that it called, if this is not torch."""


class Matmul(NamedTuple):
    """Products of matrices."""

    phase: str
    place: Place
    type: str
    """`float32`, `bfloat16` or `tf32`."""
    sizes: tuple[int, int, int, int]
    """Of how many pairs; rows; the size that both have; columns."""

    @property
    def flop(self) -> int:
        return 2 * math.prod(self.sizes)


class GpuTensor(torch.Tensor):
    """A tensor on the pretended GPU; `body`, on the device `cpu` or `meta`, is what it really is."""

    gpu: ClassVar[Gpu]
    body: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, body: Tensor) -> GpuTensor:
        own: dict[str, Any] = {"strides": body.stride(), "storage_offset": body.storage_offset()}
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls, body.shape, dtype=body.dtype, device=GPU, **own
        )
        made.body = body
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.gpu.run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # so that `Module.to` keeps its parameters
        return ["body"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_: Any) -> GpuTensor:
        return GpuTensor(tensors["body"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.body!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        copied: Tensor = nn.Parameter(copy, copy.requires_grad) if isinstance(self, nn.Parameter) else copy
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.body.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.body.untyped_storage()


class _OtherCalls(TorchDispatchMode):
    """Gives the GPU the operations that none of its tensors takes part in, such as `x.to("cuda")`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return GpuTensor.gpu.run(func, args, kwargs or {})


class Gpu:
    """The GPU, and what was asked of it; `phase` is the part of the program, as `during` names it."""

    def __init__(self, *, numbers: bool = True) -> None:
        self.numbers, self.phase = numbers, ""
        self.waits: Counter[tuple[str, Place, str]] = Counter()
        """By phase, line and reason."""
        self.matmuls: Counter[Matmul] = Counter()
        self.casts: Counter[tuple[str, Place, bool]] = Counter()
        """Numbers of weights that were converted to another type: by phase, line, and whether they train."""
        self.held, self.peaks = 0, Counter[str]()
        """Bytes of all tensors now, and the most in each phase."""
        self._storages = set[int]()

    def forget(self) -> None:
        """Begin to count anew."""
        for counter in (self.waits, self.matmuls, self.casts):
            counter.clear()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within the block torch has this GPU, in all threads, and accelerate meets it anew."""
        answers: dict[str, Any] = {"is_available": True, "is_initialized": True, "device_count": 1}
        answers |= {"is_bf16_supported": True, "_is_in_bad_fork": False, "get_device_capability": (9, 0)}
        answers |= {"current_device": 0, "get_device_name": "pretended", "mem_get_info": (MEMORY, MEMORY)}
        answers |= dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated"), 0)
        orders = ["set_device", "empty_cache", "synchronize", "manual_seed", "manual_seed_all"]
        orders += ["set_rng_state", "set_sync_debug_mode", "reset_peak_memory_stats"]
        names = answers | dict.fromkeys(orders) | {"get_rng_state": torch.get_rng_state()}
        reset = partial(AcceleratorState._reset_state, reset_partial_state=True)
        lift = torch._C._only_lift_cpu_tensors()
        GpuTensor.gpu = self
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ))
            os.environ.pop("ACCELERATE_USE_CPU", None)  # which a run on the CPU sets
            reset()
            stack.callback(reset)
            functions = {name: mock.Mock(return_value=answer) for name, answer in names.items()}
            stack.enter_context(mock.patch.multiple(torch.cuda, **functions))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
            torch._C._set_only_lift_cpu_tensors(
                True
            )  # `torch.tensor(1, device="cuda")` copies one of the CPU
            stack.callback(torch._C._set_only_lift_cpu_tensors, lift)
            stack.enter_context(_OtherCalls())  # type: ignore[no-untyped-call]
            yield

    @contextmanager
    def during(self, phase: str, module: ModuleType, function: str) -> Iterator[None]:
        """Within the block, calls of a module's function are a phase."""
        own = getattr(module, function)

        def named(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return own(*args, **kwargs)
            finally:
                self.phase = before

        with mock.patch.object(module, function, named):
            yield

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation.

        Raises:
            RuntimeError: as of CUDA, if its tensors or its generator are not all on the GPU.
        """
        op, device, generator = func.overloadpacket, kwargs.get("device"), kwargs.get("generator")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        own = [x for x in tensors if isinstance(x, GpuTensor)]
        is_here = bool(own) if device is None else torch.device(device).type == "cuda"
        if op is aten._pin_memory:
            vars(pinned := args[0].clone())["is_pinned_here"] = True
            return pinned
        if not own and not is_here:
            return func(*args, **kwargs)
        if op is aten.copy_:
            return self._copy(*args[:2])
        if op is aten._to_copy:
            return self._to(func, args[0], kwargs, is_here)
        others = [x for x in tensors if not isinstance(x, GpuTensor) and x.ndim]  # a mere number may be there
        if others and op in INDEXING and isinstance(args[0], GpuTensor):
            self._wait("index on the CPU")
        elif others or (generator is not None and generator.device != GPU):
            raise RuntimeError(f"Expected all tensors to be on the same device: {op} at {place()}")
        self._record(op, args)
        body = tree_map_only(GpuTensor, lambda x: x.body, (args, kwargs))
        if op is aten._local_scalar_dense:
            return func(_known(body[0][0]))
        out = self._wrap(self._compute(func, *body))
        return return_and_correct_aliasing(func, args, kwargs, out) if own else out

    # ------------------------------------------------------------------------------------ what is recorded

    def _wait(self, why: str) -> None:
        self.waits[self.phase, place(), why] += 1

    def _record(self, op: Any, args: Any) -> None:
        if op in WAITING:
            self._wait(op.__name__)
        if op in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1]):
            self._wait("boolean index")
        if op in FACTORS:
            a, b = args[FACTORS[op] :][:2]
            self._multiply(a, b.shape[-1])
        if op in QUERIES:
            first, count = QUERIES[op]
            self._multiply(args[first], args[first + 1].shape[-2], count)

    def _multiply(self, a: Tensor, columns: int, count: int = 1) -> None:
        kind = str(a.dtype).removeprefix("torch.")
        if kind == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
            kind = "tf32"
        rows, inner = a.shape[-2:]
        sizes = (a.shape[:-2].numel(), rows, inner, columns)
        self.matmuls[Matmul(self.phase, place(), kind, sizes)] += count

    def _wrap(self, out: Any) -> Any:
        def wrap(body: Tensor) -> GpuTensor:
            storage = body.untyped_storage()
            key, size = storage._cdata, -(-storage.nbytes() // 512) * 512  # as CUDA's allocator rounds
            if key not in self._storages:
                self._storages.add(key)
                self.held += size
                self.peaks[self.phase] = max(self.peaks[self.phase], self.held)
                weakref.finalize(storage, self._free, key, size).atexit = False
            return GpuTensor(body)

        return tree_map_only(Tensor, wrap, out)

    def _free(self, key: int, size: int) -> None:
        self._storages.remove(key)
        self.held -= size

    # ------------------------------------------------------------------------------------ what is computed

    def _copy(self, target: Tensor, source: Tensor) -> Tensor:
        if isinstance(target, GpuTensor) != isinstance(source, GpuTensor):
            self._wait("copy")
        into, body = (x.body if isinstance(x, GpuTensor) else x for x in (target, source))
        if not into.is_meta:
            into.copy_(_known(body))
        return target

    def _to(self, func: Any, source: Tensor, kwargs: dict[str, Any], is_here: bool) -> Any:
        """`x.to(…)`: to the GPU, from it, or within it."""
        was_here, dtype = isinstance(source, GpuTensor), kwargs.get("dtype")
        body = source.body if isinstance(source, GpuTensor) else source
        if was_here and is_here and isinstance(source, nn.Parameter) and dtype not in (None, source.dtype):
            self.casts[self.phase, place(), source.requires_grad] += source.numel()
        if was_here != is_here and not (kwargs.get("non_blocking") and "is_pinned_here" in vars(source)):
            self._wait("copy")
        options = {key: value for key, value in kwargs.items() if key in ("dtype", "memory_format")}
        if not is_here:
            return func(_known(body), **options)
        return self._wrap(self._compute(func, (body,), options))

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on what tensors really are."""
        op = func.overloadpacket
        if op in FACTORS and func._overloadname == "dtype":  # only CUDA multiplies 16 bits into float32
            func, args = op.default, tree_map_only(Tensor, lambda x: x.to(args[-1]), args[:-1])
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.numbers:
            return _on_cpu(func, args, kwargs)
        bare = {"device": torch.device("meta"), "generator": None}
        bare = {key: bare.get(key, value) for key, value in kwargs.items()}
        if not given:  # what makes a tensor
            out = func(*args, **bare)
            return out if out.is_floating_point() else _on_cpu(func, args, kwargs)
        # 1. Whole numbers, and shapes that depend on numbers, are computed.
        changes_whole = func._schema.is_mutable and not given[0].is_meta
        if op in WAITING or changes_whole or not any(x.is_meta for x in given):
            out = _on_cpu(func, *tree_map_only(Tensor, _known, (args, kwargs)))
            return tree_map_only(Tensor, lambda x: x.to("meta") if x.is_floating_point() else x, out)
        if op in INDEXING:  # a mask is as many indices as it is True
            found = [[x] if x is None or x.dtype != torch.bool else x.nonzero(as_tuple=True) for x in args[1]]
            args = (args[0], list(chain.from_iterable(found)), *args[2:])
        # 2. Of floats only the shape is. What is not a float is computed from 1 in place of them.
        shapes = tree_map_only(Tensor, lambda x: x.to("meta"), (args, bare))
        out = func(*shapes[0], **shapes[1])
        if all(x.is_floating_point() for x in tree_leaves(out) if isinstance(x, Tensor)):
            return out
        whole = _on_cpu(func, *tree_map_only(Tensor, _known, (args, kwargs)))
        return tree_map(lambda x, y: x if x.is_floating_point() else y, out, whole)


def _known(body: Tensor) -> Tensor:
    """Its numbers, or 1."""
    return torch.ones(body.shape, dtype=body.dtype) if body.is_meta else body


def _on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """By the CPU's kernels, which want a generator of the CPU too."""
    own: dict[str, Any] = {"device": torch.device("cpu")}
    if (generator := kwargs.get("generator")) is not None:
        own["generator"] = torch.Generator().set_state(generator.get_state())
    out = func(*args, **{key: own.get(key, value) for key, value in kwargs.items()})
    if generator is not None:
        generator.set_state(own["generator"].get_state())
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by a CPU's fused kernel, which keeps what those of CUDA keep."""
    if not isinstance(query, GpuTensor):
        how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return CPU_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **how)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    is_flash = attn_mask is None and query.dtype != torch.float32  # the one kernel that has grouped queries
    if enable_gqa and (GpuTensor.gpu.numbers or not is_flash):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    result: Tensor = FUSED(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result


def place() -> Place:
    """Where this thread is."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        name = frame.f_code.co_qualname.partition(".<locals>")[0]
        if file.startswith(OURS):
            return Place(f"{file.removeprefix(OURS + '/')} {name}", frame.f_lineno, library)
        if not library and "/site-packages/" in file and not file.startswith(TORCH):
            library = f"{file.rpartition('/site-packages/')[2]} {name}"
        frame = frame.f_back
    return Place("", 0, library)
