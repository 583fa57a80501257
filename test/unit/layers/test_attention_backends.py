"""Attention backends by name, what is said where one cannot run, and what auto chooses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import SCALE, Case

from fenceline.config.kv_layout import KVLayout
from fenceline.layers.attention import backends, flashinfer_library
from fenceline.layers.attention.backends import (
    AttentionSetting,
    BackendsByKind,
    choose,
    make_attention_backends,
    measure_us,
)
from fenceline.layers.attention.base import AttentionBackend, LayerRules
from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.attention.fa3_backend import Fa3AttentionBackend
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, ForwardMode, GraphDecodeInputs
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device, open_device
from fenceline.memory_order.device import CpuDevice

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


class PretendCuda(CpuDevice):
    """Says that it is a GPU."""

    kind = "cuda"


def pool(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> KVPool:
    return KVPool(40, KVLayout.uniform(16, 2, 2, head_dim, str(dtype).removeprefix("torch.")), torch.device("cpu"))


def setting(device: Device, kv_pool: KVPool | None = None) -> AttentionSetting:
    return AttentionSetting(kv_pool or pool(), device, num_heads=4, context_length=64)


# --- what the measurements say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "prefill", "decode"),
    [
        ({"triton": 30.0, "flashinfer": 20.0}, "flashinfer", "flashinfer"),
        ({"triton": 21.9, "flashinfer": 20.0}, "flashinfer", "triton"),
        ({"triton": 22.1, "flashinfer": 20.0}, "flashinfer", "flashinfer"),
        ({"triton": 21.0, "fa3": 19.0, "flashinfer": 18.0}, "flashinfer", "fa3"),
        ({"flashinfer": 18.0}, "flashinfer", "flashinfer"),
        ({"triton": 18.0, "fa3": 18.5}, "triton", "triton"),
    ],
)
def test_a_backend_that_plans_has_to_be_a_tenth_faster_in_decode(
    times: dict[str, float], prefill: str, decode: str
) -> None:
    assert choose(times, EXTEND) == prefill
    assert choose(times, DECODE) == decode


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_the_measurement_leaves_the_pool_alone(mode: ForwardMode) -> None:
    kv_pool = pool(torch.float32, head_dim=8)
    kv_pool.row(0, "k").normal_()
    before = kv_pool.row(0, "k").clone()
    calls: list[int] = []

    class Counting(CpuAttentionBackend):
        def plan(self, inputs):  # type: ignore[no-untyped-def]
            calls.append(int(inputs.seq_lens_cpu.sum()))
            return super().plan(inputs)

        def plan_graph(self, inputs):  # type: ignore[no-untyped-def]
            calls.append(int(inputs.seq_lens.sum()))
            return super().plan_graph(inputs)

    device = open_device("cpu")
    assert measure_us(Counting(kv_pool), setting(device, kv_pool), mode) > 0
    assert calls == [4 * 64 if mode is EXTEND else 32 * 64], "as many tokens as a context has"
    assert torch.equal(kv_pool.row(0, "k"), before)


# --- auto --------------------------------------------------------------------------------------------


class Fake(CpuAttentionBackend):
    """A backend by some name."""

    def __init__(self, name: str, kv_pool: KVPool) -> None:
        super().__init__(kv_pool)
        self.name = name


Times = dict[str, float | Exception]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], list[str]]:
    """Pretends that these backends are installed and measure so; an exception says why one cannot be used."""

    def pretend(times: Times) -> list[str]:
        measured: list[str] = []

        def maker(name: str) -> Callable[[AttentionSetting], AttentionBackend]:
            def make(setting: AttentionSetting) -> AttentionBackend:
                result = times.get(name, ValueError(f"{name} is not installed"))
                if isinstance(result, ValueError):
                    raise result
                return Fake(name, setting.kv_pool)

            return make

        def measure(backend: AttentionBackend, setting: AttentionSetting, mode: ForwardMode) -> float:
            assert isinstance(backend, Fake)
            measured.append(backend.name)
            result = times[backend.name]
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(
            backends, "ATTENTION_BACKENDS", {name: maker(name) for name in ("fa3", "flashinfer", "triton")}
        )
        monkeypatch.setattr(backends, "measure_us", measure)
        return measured

    return pretend


def chosen(prefill: str = "auto", decode: str = "auto") -> tuple[str, str]:
    made = make_attention_backends(prefill, decode, setting(PretendCuda()))
    for backend, name in ((made.prefill, made.prefill_name), (made.decode, made.decode_name)):
        assert isinstance(backend, Fake) and backend.name == name
    assert (made.prefill is made.decode) == (made.prefill_name == made.decode_name)
    return made.prefill_name, made.decode_name


def test_auto_takes_the_fastest_and_says_why(
    machine: Callable[[Times], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fenceline")
    machine({"triton": 21.0, "flashinfer": 20.0})
    assert chosen() == ("flashinfer", "triton")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, "one line for each kind of step"
    assert "prefill steps: flashinfer" in lines[0] and "decode steps: triton" in lines[1]
    assert "triton 21.0 us" in lines[0] and "flashinfer 20.0 us" in lines[0]
    assert "fa3 is not installed" in lines[0]


def test_a_backend_that_breaks_is_left_out(machine: Callable[[Times], list[str]]) -> None:
    machine({"triton": RuntimeError("no kernel image"), "fa3": 30.0, "flashinfer": TypeError("another version")})
    assert chosen() == ("fa3", "fa3")


def test_named_backends_are_not_measured(machine: Callable[[Times], list[str]]) -> None:
    measured = machine({"triton": 1.0, "flashinfer": 2.0})
    assert chosen("flashinfer", "flashinfer") == ("flashinfer", "flashinfer")
    assert measured == []
    assert chosen("flashinfer", "auto") == ("flashinfer", "triton")
    assert set(measured) == {"triton", "flashinfer"}


def test_a_named_backend_that_cannot_run_is_an_error(machine: Callable[[Times], list[str]]) -> None:
    machine({"triton": 1.0})
    with pytest.raises(ValueError, match="fa3 is not installed"):
        chosen("fa3", "auto")


def test_without_a_gpu_and_without_libraries_it_is_the_reference(
    machine: Callable[[Times], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = make_attention_backends("auto", "auto", setting(open_device("cpu")))
    assert (chosen.prefill_name, chosen.decode_name) == ("torch", "torch")
    assert isinstance(chosen.prefill, CpuAttentionBackend) and chosen.prefill is chosen.decode
    makers = dict(backends.ATTENTION_BACKENDS)
    machine({})
    nothing = backends.ATTENTION_BACKENDS
    monkeypatch.setattr(backends, "ATTENTION_BACKENDS", {**nothing, "torch": makers["torch"]})
    assert make_attention_backends("auto", "auto", setting(PretendCuda())).decode_name == "torch"


@pytest.mark.parametrize("compiled", [True, False])
def test_no_server_waits_for_another_backend_s_compiler(
    machine: Callable[[Times], list[str]], monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """What is slow to compile is compiled in the background, for the prefill steps of the next start; decode steps are
    not worth it. A flag that names it waits for it, but not before graphs are captured."""
    measured = machine({"triton": 30.0, "flashinfer": 10.0})
    begun: list[str] = []

    def begin(self: Fake) -> None:
        if not self.is_compiled(EXTEND):
            begun.append(self.name)

    monkeypatch.setattr(Fake, "is_compiled", lambda self, mode: compiled or self.name == "triton")
    monkeypatch.setattr(Fake, "begin_to_compile", begin)
    assert chosen() == (("flashinfer", "flashinfer") if compiled else ("triton", "triton"))
    assert measured == (["triton", "flashinfer"] * 2 if compiled else ["triton"] * 2)
    assert chosen("flashinfer", "triton") == ("flashinfer", "triton")
    assert begun == ([] if compiled else ["flashinfer"] * 2)


def test_a_machine_with_one_backend_waits_for_its_compiler(
    machine: Callable[[Times], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine({"flashinfer": 10.0})
    monkeypatch.setattr(Fake, "is_compiled", lambda self, mode: False)
    assert chosen() == ("flashinfer", "flashinfer")


# --- what is said where one cannot run -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["flashinfer", "fa3", "triton"])
def test_gpu_backends_are_refused_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs an NVIDIA GPU: use --attention-backend torch"):
        make_attention_backends(name, "torch", setting(open_device("cpu")))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown; use fa3, flashinfer, torch, triton"):
        make_attention_backends("torch", "fa9", setting(open_device("cpu")))


def test_a_missing_or_foreign_flashinfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(flashinfer_library, "version", missing)
    with pytest.raises(ValueError, match=r"pip install 'fenceline\[cuda\]', or use --attention-backend triton"):
        FlashInferAttentionBackend(pool(), PretendCuda(), 4)
    monkeypatch.setattr(flashinfer_library, "version", lambda name: "0.2.9")
    monkeypatch.setattr(flashinfer_library, "import_module", lambda name: ModuleType(name))
    with pytest.raises(ValueError, match=r"0\.2\.9 is installed, 0\.6 or 0\.7 is needed"):
        FlashInferAttentionBackend(pool(), PretendCuda(), 4)


@pytest.mark.parametrize(
    ("installed", "more"),
    [
        ("0.6.14", ()), ("0.6.15.post1", ()), ("0.6.16", (0,)), ("0.6.18.post1", (0,)), ("0.7.2.post1", (0,)),
        ("0.7.4", (0, False)),
    ],
)  # fmt: skip
def test_fa2_is_told_as_much_as_its_version_takes(
    installed: str, more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in csrc/batch_prefill_jit_binding.cu; a call with more or fewer arguments is a TypeError."""
    monkeypatch.setattr(flashinfer_library, "version", lambda name: installed)
    assert flashinfer_library.InstalledLibrary().split_args == (-1, False, 0, *more)


@pytest.mark.parametrize("generation", ["fa2", "fa3"])
def test_the_module_that_flashinfer_loads_is_the_one_compiled_ahead(
    generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.7.2 on get_batch_prefill_module loads for fa2 what a generator of its own makes, under another name."""
    generators = ModuleType("flashinfer.jit.attention.modules")
    monkeypatch.setattr(flashinfer_library, "import_module", lambda name: generators)
    shape = flashinfer_library.AttentionShape(4, 2, 64, 16, torch.bfloat16)
    module = flashinfer_library.InstalledLibrary().prefill_module(shape, generation)
    compiled = {"gen_batch_prefill_module": False, "_gen_batch_prefill_primary_module": True}
    for name, is_compiled in compiled.items():
        spec = SimpleNamespace(is_compiled=is_compiled)
        monkeypatch.setattr(generators, name, lambda *_, spec=spec: spec, raising=False)
        assert module.is_compiled is (is_compiled and generation == "fa2")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [(torch.float32, 64, "use --dtype bfloat16"), (torch.bfloat16, 80, "no kernels for heads of 80")],
)
def test_flashinfer_says_what_it_cannot_compute(dtype: torch.dtype, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlashInferAttentionBackend(pool(dtype, head_dim), PretendCuda(), 4)


def test_backends_without_sinks_say_so_and_which_has_them() -> None:
    rules = {0: LayerRules(sinks=torch.zeros(4)), 1: LayerRules(window=9)}
    with pytest.raises(ValueError, match="flashinfer has no kernels with attention sinks: use .* triton"):
        FlashInferAttentionBackend(pool(), PretendCuda(), 4, rules={0: rules[0]})
    with pytest.raises(ValueError, match="fa3 does not support attention sinks: use --attention-backend triton"):
        Fa3AttentionBackend(pool(), print, {0: rules[0]})  # type: ignore[arg-type]


def test_auto_takes_a_backend_that_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster one has no sinks, which only some layers have."""

    def fast(setting: AttentionSetting) -> AttentionBackend:
        if any(rule.sinks is not None for rule in setting.rules.values()):
            raise ValueError("no sinks")
        return Fake("flashinfer", setting.kv_pool)

    def slow(setting: AttentionSetting) -> AttentionBackend:
        return Fake("triton", setting.kv_pool)

    def measure(backend: AttentionBackend, setting: AttentionSetting, mode: ForwardMode) -> float:
        parts = backend.backends if isinstance(backend, BackendsByKind) else (backend,)
        return 9.0 if any(isinstance(part, Fake) and part.name == "triton" for part in parts) else 1.0

    monkeypatch.setattr(backends, "ATTENTION_BACKENDS", {"flashinfer": fast, "triton": slow})
    monkeypatch.setattr(backends, "measure_us", measure)
    plain = setting(PretendCuda())
    assert make_attention_backends("auto", "auto", plain).prefill_name == "flashinfer"
    ruled = replace(plain, rules={1: LayerRules(7, sinks=torch.zeros(4))})
    chosen = make_attention_backends("auto", "auto", ruled)
    assert (chosen.prefill_name, chosen.decode_name) == ("triton", "triton")
    assert isinstance(chosen.prefill, BackendsByKind) and len(chosen.prefill.backends) == 2


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_layers_with_different_windows_attend_in_their_own(mode: ForwardMode) -> None:
    """Through one plan, eager and of a graph; and measuring such a backend runs it."""
    lens = [70, 9, 33]
    new = [1, 1, 1] if mode is DECODE else [20, 9, 1]
    rules = {1: LayerRules(window=12)}
    windowed = Case(lens, new, 16, (4, 2), seed=3, rules=rules[1])
    plain = Case(lens, new, 16, (4, 2), seed=3)
    given = windowed.pool
    given.row(0, "k").copy_(given.row(1, "k"))
    given.row(0, "v").copy_(given.row(1, "v"))
    wanted = AttentionSetting(given, open_device("cpu"), num_heads=4, context_length=70, rules=rules)
    backend = make_attention_backends("torch", "torch", wanted).prefill
    q = torch.cat(windowed.queries)
    kv = [torch.cat(windowed._last(tensors)) for tensors in (windowed.keys, windowed.values)]
    seq_lens = torch.tensor(lens)
    inputs = AttentionInputs(mode, windowed.page_table, windowed.rows, seq_lens, np.array(lens), np.array(new))
    plans = [backend.plan(inputs)]
    if mode is DECODE:
        plans.append(backend.plan_graph(GraphDecodeInputs(windowed.page_table, windowed.rows, seq_lens, 70)))
    for plan in plans:
        assert plan is not None
        plan.prepare()
        for layer, case in enumerate((plain, windowed)):
            expected = torch.cat(case.expected())
            output = plan.forward(layer, q, *kv, SCALE)
            torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    measured = replace(wanted, kv_pool=pool(torch.float32, head_dim=8), context_length=64)
    backend = make_attention_backends("torch", "torch", measured).prefill
    assert measure_us(backend, measured, mode) > 0


def test_fa3_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", None)
    with pytest.raises(ValueError, match="pip install sglang-kernel, or use --attention-backend flashinfer"):
        Fa3AttentionBackend(pool())
    with pytest.raises(ValueError, match="use --dtype bfloat16"):
        Fa3AttentionBackend(pool(torch.float32))
    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    module.__dict__.update(is_fa3_supported=lambda: False, flash_attn_with_kvcache=None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    with pytest.raises(ValueError, match="no FlashAttention-3 for this GPU"):
        Fa3AttentionBackend(pool())
    module.__dict__["is_fa3_supported"] = lambda: True
    module.__dict__["flash_attn_with_kvcache"] = print
    assert Fa3AttentionBackend(pool()).attend is print
