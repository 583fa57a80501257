"""Turns torch operators into operations in a queue.

Views are metadata and are made at once. All other operators are queued: their outputs are allocated at the call, with
the shape and strides that the CPU's kernel gives, and the values are written when the operation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fenceline_sim import backend
from fenceline_sim.copies import copy_, to_copy
from fenceline_sim.errors import VgpuError
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.layout import Form, form_of
from fenceline_sim.memory import NO_ACCESS, NO_BOUNDS, Access, Bound, Bounds
from fenceline_sim.operators import Indexes, Kind, Operator
from fenceline_sim.place import here
from fenceline_sim.tensor import VTensor, access, new_tensor, set_dispatch, wrap

Kwargs = Mapping[str, Any]
Handler = Callable[["Operator", tuple[Any, ...], Kwargs], Any]

_operators: dict[Any, Operator] = {}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run, queue or refuse one operator that has a VTensor among its arguments."""
    operator = _operators.get(func)
    if operator is None:
        operator = _operators[func] = Operator(func)
    return _HANDLERS[operator.kind](operator, args, kwargs)


class _Call:
    """An operator's arguments: as the kernel will see them, and as a key of everything but values."""

    __slots__ = ("args", "key", "kwargs", "tensors")

    def __init__(self, operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        self.key: list[Any] = [operator]
        self.tensors: list[VTensor] = []
        self.args = [self._plain(arg) for arg in args]
        self.kwargs = {name: self._plain(arg, name) for name, arg in kwargs.items()} if kwargs else {}

    def _plain(self, arg: Any, name: str = "") -> Any:
        kind = type(arg)
        if kind is VTensor or isinstance(arg, VTensor):
            self.tensors.append(arg)
            self.key.append(arg.layout_.form)
            return arg.plain
        if kind is list or kind is tuple:
            self.key.append(len(arg))
            return [self._plain(item) for item in arg]
        if name:
            self.key.append(name)
        if isinstance(arg, torch.Tensor):
            self.key.append((arg.shape, arg.dtype))
            return arg.clone()  # host values are taken at the call
        if kind is torch.device:
            return _CPU
        self.key.append((kind, arg))
        return arg

    @property
    def gpu(self) -> VirtualGpu:
        gpu = self.tensors[0].gpu
        for tensor in self.tensors:
            if tensor.gpu is not gpu:
                raise VgpuError("tensors of two virtual GPUs meet in one operation")
        return gpu


_CPU = torch.device("cpu")


def _argument(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs, position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _written(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> list[VTensor]:
    found: list[VTensor] = []
    for position, name in operator.mutated:
        value = _argument(operator, args, kwargs, position, name)
        if isinstance(value, torch.Tensor) and not isinstance(value, VTensor):
            raise VgpuError(f"{operator.label} would write a host tensor; only copy_ does that")
        found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return found


_outputs: dict[tuple[Any, ...], Any] = {}


def _output_forms(call: _Call, operator: Operator, written: list[VTensor]) -> Any:
    """Form, or tuple of forms, of the new tensors. Also checks the arguments, as the CPU's kernel does."""
    key = tuple(call.key)
    try:
        return _outputs[key]
    except KeyError:
        pass
    except TypeError:  # an argument that cannot be hashed
        return _forms(_dry_run(call, operator, written))
    forms = _outputs[key] = _forms(_dry_run(call, operator, written))
    return forms


def _dry_run(call: _Call, operator: Operator, written: list[VTensor]) -> Any:
    """The kernel's result for arguments of the right form, whose values do not matter."""
    targets = {id(tensor.plain) for tensor in written}
    plain = {id(t.plain): _stand_in(t.plain, id(t.plain) in targets) for t in call.tensors}

    def swap(arg: Any) -> Any:
        return [swap(item) for item in arg] if isinstance(arg, list) else plain.get(id(arg), arg)

    with torch.inference_mode():
        return operator.func(*swap(call.args), **{k: swap(v) for k, v in call.kwargs.items()})


def _stand_in(plain: torch.Tensor, written: bool) -> torch.Tensor:
    if plain.is_floating_point() and not written:
        return plain
    with torch.inference_mode():
        return torch.empty_strided(tuple(plain.shape), plain.stride(), dtype=plain.dtype).zero_()


def _forms(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return form_of(tuple(result.shape), result.stride(), result.dtype)
    if isinstance(result, (tuple, list)):
        return tuple(_forms(item) for item in result)
    return None


def _view(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    base: VTensor = args[0]
    result = operator.func(base.plain, *args[1:], **kwargs)
    # Inside inference mode a view of a normal tensor is a normal tensor, and torch checks.
    if not base.is_inference() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _wrap_views(base, result)
    return _wrap_views(base, result)


def _wrap_views(base: VTensor, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        view = wrap(result, base.allocation)
        if base.generation:
            view.generation = base.generation
        return view
    return [_wrap_views(base, item) for item in result]


def _kernel(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    if operator.indexes is not None and _has_mask(args):
        return _sync(operator, args, kwargs)
    call = _Call(operator, args, kwargs)
    written = _written(operator, args, kwargs) if operator.mutated else []
    forms = _output_forms(call, operator, written)
    gpu, place = call.gpu, here()
    func = operator.func
    indexes = () if operator.indexes is None else operator.indexes(call.args)
    bounds = _bounds(call, indexes) if indexes else NO_BOUNDS
    if operator.is_out:
        _check_out(operator, forms, written)
    fresh = {id(t) for t in written} if operator.overwrites and not _accumulates(operator, call) else set()
    reads = [_access(t, indexes) for t in call.tensors if id(t) not in fresh]
    writes = [_access(t, indexes) for t in written]
    plain_args, plain_kwargs = call.args, call.kwargs
    if None not in operator.outputs:
        gpu.submit(operator.label, lambda: func(*plain_args, **plain_kwargs), reads, writes, place, bounds=bounds)
        return _same(operator, args, kwargs)
    outputs = _new_outputs(gpu, forms, operator, place)
    writes += [Access(t.allocation.tag, t.layout_) for t in outputs]
    targets = [t.plain for t in outputs]

    def run() -> None:
        _store(func(*plain_args, **plain_kwargs), targets)

    gpu.submit(operator.label, run, reads, writes, place, bounds=bounds)
    return outputs[0] if isinstance(forms, Form) else _returned(operator, args, kwargs, forms, outputs)


def _accumulates(operator: Operator, call: _Call) -> bool:
    """Whether this call of an overwriting operator adds to what is there."""
    return operator.label == "index_put_" and any(arg is True for arg in (*call.args, *call.kwargs.values()))


def _check_out(operator: Operator, forms: Any, written: list[VTensor]) -> None:
    for form, tensor in zip(forms if isinstance(forms, tuple) else (forms,), written, strict=True):
        if form.shape != tuple(tensor.shape):
            raise VgpuError(f"{operator.label}: out has shape {list(tensor.shape)}, it needs {list(form.shape)}")


def _access(tensor: VTensor, indexes: Indexes) -> Access:
    for indexed, axis, index in indexes:
        if axis == 0 and tensor.plain is indexed:
            return access(tensor, index)
    return access(tensor)


def _bounds(call: _Call, indexes: Indexes) -> Bounds:
    tensors = {id(tensor.plain): tensor for tensor in call.tensors}
    found = []
    for indexed, axis, index in indexes:
        target, source = tensors.get(id(indexed)), tensors.get(id(index))
        if target is not None:
            where = None if source is None else access(source)
            found.append(Bound(target.allocation.tag, axis, target.shape[axis], index, where))
    return found


def _new_outputs(gpu: VirtualGpu, forms: Any, operator: Operator, place: Any) -> list[VTensor]:
    if isinstance(forms, Form):
        return [new_tensor(gpu, forms, place)]
    flat: list[VTensor] = []
    for index, form in enumerate(forms or ()):
        if isinstance(form, tuple):  # a list of tensors
            flat += [new_tensor(gpu, item, place) for item in form]
        elif form is not None and not (index < len(operator.outputs) and operator.outputs[index]):
            flat.append(new_tensor(gpu, form, place))
    return flat


def _store(result: Any, targets: list[torch.Tensor]) -> None:
    if isinstance(result, torch.Tensor):
        targets[0].copy_(result)
        return
    values = [item for part in result for item in (part if isinstance(part, (list, tuple)) else (part,))]
    fresh = [value for value in values if isinstance(value, torch.Tensor)]
    for target, value in zip(targets, fresh, strict=True):
        target.copy_(value)


def _same(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    positions = {name: position for position, name in operator.mutated}
    results = [_argument(operator, args, kwargs, positions[name], name) for name in operator.outputs if name]
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _returned(operator: Operator, args: Any, kwargs: Kwargs, forms: Any, outputs: list[VTensor]) -> Any:
    if len(operator.outputs) == 1:  # one list of tensors
        return outputs
    assert all(name is None for name in operator.outputs), f"{operator.label} both writes and returns"
    return tuple(outputs)


def _has_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 else None
    if not isinstance(indices, (list, tuple)):
        return False
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _sync(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Queue the operator, wait for its result, and allocate memory for that."""
    call = _Call(operator, args, kwargs)
    written = _written(operator, args, kwargs) if operator.mutated else []
    gpu, place = call.gpu, here()
    box: list[Any] = []
    reads = [access(t) for t in call.tensors]
    writes = [access(t) for t in written]
    func, plain_args, plain_kwargs = operator.func, call.args, call.kwargs
    done = gpu.submit(operator.label, lambda: box.append(func(*plain_args, **plain_kwargs)), reads, writes, place)
    gpu.synchronize(done)
    if written:
        return _same(operator, args, kwargs)
    result = box[0]
    if not isinstance(result, (torch.Tensor, tuple, list)):
        return result
    values = [result] if isinstance(result, torch.Tensor) else list(result)
    outputs = [new_tensor(gpu, form, place) for form in (_forms(value) for value in values)]
    targets = [t.plain for t in outputs]
    fills = [Access(t.allocation.tag, t.layout_) for t in outputs]
    gpu.submit(operator.label, lambda: _store(tuple(values), targets), NO_ACCESS, fills, place)
    return outputs[0] if isinstance(result, torch.Tensor) else tuple(outputs)


def _like(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    call = _Call(operator, args, kwargs)
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != backend.NAME:
        with torch.inference_mode():
            return operator.func(*call.args, **call.kwargs)
    form = _output_forms(call, operator, [])
    gpu, place = call.gpu, here()
    func = operator.func
    output = new_tensor(gpu, form, place)
    if operator.kind is Kind.LIKE:
        plain_args, plain_kwargs, target = call.args, call.kwargs, output.plain

        def run() -> None:
            target.copy_(func(*plain_args, **plain_kwargs))

        gpu.submit(operator.label, run, NO_ACCESS, [Access(output.allocation.tag, output.layout_)], place)
    return output


def _refused(operator: Operator, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    raise VgpuError(f"{operator.label} is not available on the virtual GPU")


_HANDLERS: dict[Kind, Handler] = {
    Kind.COMPOSITE: lambda operator, args, kwargs: backend.decompose(operator.func, args, kwargs),
    Kind.COPY: lambda operator, args, kwargs: copy_(*args, **kwargs),
    Kind.TO_COPY: lambda operator, args, kwargs: to_copy(*args, **kwargs),
    Kind.VIEW: _view, Kind.KERNEL: _kernel, Kind.LIKE: _like, Kind.EMPTY: _like, Kind.SYNC: _sync,
    Kind.REFUSED: _refused,
}  # fmt: skip


set_dispatch(dispatch)
