"""The smoke test of what vgpu uses of torch's private parts. If it fails, look at backend.py first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fenceline.memory_order import open_device
from fenceline_sim import VgpuDevice, VgpuError, VirtualGpu, use
from fenceline_sim.tensor import VTensor


@pytest.fixture(params=["fifo", "eager", "laziest", "random"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return use(VirtualGpu(seed=3, policy=request.param))


MODES = pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])

FACTORIES = {
    "empty": lambda d: torch.empty(2, 3, device=d).zero_(),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, dtype=torch.int64, device=d),
    "full": lambda d: torch.full((2, 2), 7.0, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange with steps": lambda d: torch.arange(1, 9, 2, dtype=torch.float32, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "to": lambda d: torch.tensor([1.5, 2.5]).to(d),
    "zeros_like": lambda d: torch.zeros_like(torch.empty(2, 3, device=d)),
    "new_full": lambda d: torch.empty(2, device=d).new_full((3,), 4),
    "new_tensor": lambda d: torch.empty(2, device=d).new_zeros(3, dtype=torch.int32),
}


@MODES
@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str, inference: bool, device: torch.device) -> None:
    with torch.inference_mode(inference):
        made, expected = FACTORIES[name](device), FACTORIES[name](torch.device("cpu"))
        assert isinstance(made, VTensor) and made.device.type == "vgpu"
        assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected)


X = torch.arange(24, dtype=torch.float32).view(2, 3, 4) / 7 - 1
INDEX = torch.tensor([1, 0, 1])

OPERATORS = {
    "arithmetic": lambda x, i: (x + 1) * x / 3 - x**2,
    "matmul": lambda x, i: x @ x.transpose(1, 2),
    "linear": lambda x, i: F.linear(x, x[0]),
    "rms_norm": lambda x, i: F.rms_norm(x, (4,), x[0, 0], 1e-6),
    "attention": lambda x, i: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "silu": lambda x, i: F.silu(x).mul_(2),
    "softmax": lambda x, i: x.softmax(-1),
    "log_softmax": lambda x, i: torch.log_softmax(x, dim=-1, dtype=torch.float64),
    "embedding": lambda x, i: F.embedding(i, x[0]),
    "index": lambda x, i: x[0][i],
    "two indexes": lambda x, i: x[i, i],
    "boolean index": lambda x, i: x[x > 0],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x[0].gather(1, i[:, None]),
    "index_put": lambda x, i: x.clone().index_put_((i[:2],), x.flip(0)),
    "assignment": lambda x, i: x.clone().__setitem__(i[:1], 5.0),
    "mask assignment": lambda x, i: x.clone().masked_fill_(x > 0, 1.0),
    "where": lambda x, i: torch.where(x > 0, x, 0.0),
    "topk": lambda x, i: x.topk(2, dim=-1).values,
    "sort": lambda x, i: x.sort(dim=-1, descending=True).indices,
    "argsort": lambda x, i: x.argsort(-1),
    "max": lambda x, i: x.max(dim=1).indices,
    "argmax": lambda x, i: x.argmax(-1),
    "cumsum": lambda x, i: x.cumsum(-1),
    "sum": lambda x, i: x.sum(),
    "cat": lambda x, i: torch.cat([x, x[:1]]),
    "stack": lambda x, i: torch.stack([x, x]),
    "chunk": lambda x, i: x.chunk(2, dim=-1)[1],
    "split": lambda x, i: x.split([1, 3], dim=-1)[1],
    "unbind": lambda x, i: x.unbind(0)[1],
    "reshape": lambda x, i: x.transpose(0, 2).reshape(4, 6),
    "unflatten": lambda x, i: x.unflatten(-1, (2, 2)).permute(2, 0, 1, 3),
    "expand": lambda x, i: x[:, None].expand(-1, 5, -1, -1).contiguous(),
    "view as bytes": lambda x, i: x.view(torch.uint8),
    "nonzero": lambda x, i: (x > 0).nonzero(),
    "nan_to_num": lambda x, i: (x / 0).nan_to_num_(nan=0.0),
    "scatter_add": lambda x, i: torch.zeros_like(x[0]).scatter_add_(0, i[:, None].expand(3, 4), x[0]),
    "out": lambda x, i: torch.add(x, x, out=torch.empty_like(x)),
    "integer division": lambda x, i: i // 2 + i % 2,
    "cpu scalar": lambda x, i: x * torch.tensor(2.0),
    "addcmul": lambda x, i: x.clone().addcmul_(x, x, value=-1.0),
    "clamp": lambda x, i: x.clamp(max=0.5),
    "bitwise": lambda x, i: (i << 3).bitwise_xor_(i) >> 1,
    "to dtype": lambda x, i: x.to(torch.int64).float(),
    "einsum": lambda x, i: torch.einsum("abc,abd->acd", x, x),
}


@MODES
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_cpus_values_and_forms(name: str, inference: bool, device: torch.device) -> None:
    with torch.inference_mode(inference):
        expected = OPERATORS[name](X.clone(), INDEX.clone())
        result = OPERATORS[name](X.to(device), INDEX.to(device))
        if expected is None:
            return
        assert result.device.type == "vgpu" and result.dtype == expected.dtype
        assert result.stride() == expected.stride()
        assert torch.equal(result.cpu(), expected)


@MODES
def test_host_reads(inference: bool, device: torch.device) -> None:
    with torch.inference_mode(inference):
        x = X.to(device)
        assert x[0, 0, 0].item() == -1.0 and float(x.sum()) == pytest.approx(float(X.sum()))
        assert bool((x < 9).all()) and x.tolist() == X.tolist() and len(x) == 2
        assert repr(x[0]).startswith("vgpu tensor(")
        assert torch.equal(x, X.to(device)) and (x.numpy(force=True) == X.numpy()).all()
        with pytest.raises(TypeError, match="use Tensor.cpu"):
            x.numpy()


def test_views_made_in_inference_mode_write_to_their_tensors(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    with torch.inference_mode():
        x[1:3].add_(1)
        x[:1] = 5
    x[3:].add_(2)
    assert x.tolist() == [5.0, 1.0, 1.0, 2.0]


def test_parameters_and_modules_live_on_the_device(device: torch.device) -> None:
    with torch.no_grad():
        linear = torch.nn.Linear(3, 2, device="meta").to_empty(device=device)
        linear.weight.fill_(1.0)
        linear.bias.zero_()
    assert isinstance(linear.weight, torch.nn.Parameter) and linear.weight.device.type == "vgpu"
    with torch.inference_mode():
        assert linear(torch.ones(1, 3, device=device)).tolist() == [[3.0, 3.0]]


def test_errors_in_arguments_are_raised_at_the_call(device: torch.device) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(2, 3, device=device) @ torch.zeros(2, 3, device=device)
    with pytest.raises(VgpuError, match="record_stream is not available"):
        torch.ops.aten.record_stream(torch.zeros(2, device=device), torch.Stream(device="cpu"))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_output_of_the_wrong_shape_is_refused(device: torch.device) -> None:
    with pytest.raises(VgpuError, match=r"out has shape \[3\], it needs \[2\]"):
        torch.add(torch.ones(2, device=device), 1, out=torch.empty(3, device=device))


def test_tensors_of_two_gpus_do_not_meet() -> None:
    gpus = VirtualGpu(), VirtualGpu()
    one, other = [torch.ones(2, device=use(gpu)) for gpu in gpus]
    with pytest.raises(VgpuError, match="two virtual GPUs"):
        one + other


def test_the_device_is_known_by_its_kind() -> None:
    device = open_device("vgpu", severed=frozenset({"staging_reuse"}))
    assert isinstance(device, VgpuDevice) and device.severed == {"staging_reuse"}
    free, total = device.memory_info()
    assert 0 < free <= total
