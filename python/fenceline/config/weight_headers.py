"""What the headers of a checkpoint's files say, without torch: whether the files are whole, whether they
belong to config.json, and whether the weights fit in memory."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from fenceline.config import ConfigError
from fenceline.config.gguf_file import is_gguf
from fenceline.config.gguf_model import header_type
from fenceline.config.model_config import ModelConfig
from fenceline.config.quantization import ON_LINE_METHOD, QuantConfig, gguf_pieces

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_NOT_KEPT = (".weight_shape", ".g_idx", ".inv_freq")  # tensors of which no values stay in memory
_ON_LINE_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5}  # of a number
# The tensors of a text model, also inside one that sees images.
_OF_TEXT = re.compile(
    r"(?:language_model\.)?(?:(?:(?:model|backbone)\.(?:language_model\.)?|(?=embed_tokens\.|layers\.|norm\.))"
    r"(?:layers\.(?P<layer>\d+)\.(?P<inside>.+)|(?P<outside>.+))|(?P<head>lm_head\..+))"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in ``file``: its type as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers; those of an unknown type count as one byte each."""
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8


def read_headers(files: Iterable[Path], quantization: QuantConfig | None = None) -> dict[str, StoredTensor]:
    """All tensors of ``files`` by name, for a model with ``quantization``. Raises ``ConfigError``, one line with the
    file and the remedy, for a file that is not whole or whose header cannot be true, and for a tensor that is in two of
    them."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            if is_gguf(path):
                pieces = gguf_pieces(path, quantization).items()
                found = {name: StoredTensor(header_type(piece), piece.shape, path) for name, piece in pieces}
            else:
                with safe_open(path, framework="numpy") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    found = {
                        name: StoredTensor(one.get_dtype(), tuple(one.get_shape()), path)
                        for name, one in slices.items()
                    }
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
        except SafetensorError as error:
            raise ConfigError(f"{path}: truncated or damaged ({error}); download the file again") from None
        if twice := sorted(tensors.keys() & found.keys()):
            raise ConfigError(f"{path}: weight {twice[0]} comes twice; remove the extra safetensors file")
        tensors |= found
    return tensors


def check_headers(model: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ``ConfigError`` where the types or shapes of tensors that every family has do not fit ``model``, for a
    head that is quantised, and for GPTQ's columns in the order of activations. The rest is checked by the process that
    loads them, which knows the family's layers."""
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    shapes = {
        "embed_tokens.weight": (model.vocab_size, hidden),
        "lm_head.weight": (model.vocab_size, hidden),
        "norm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
    }
    if (sizes := model.latent) is not None:
        shapes["self_attn.kv_a_proj_with_mqa.weight"] = (sizes.width, hidden)
        shapes["self_attn.o_proj.weight"] = (hidden, model.num_heads * sizes.v_head_dim)
    if model.recurrent is not None:  # some families also have a row of gates for each of the queries'
        del shapes["self_attn.q_proj.weight"]
    stored_as = model.quantization
    is_plain = stored_as is None or stored_as.method == ON_LINE_METHOD
    head = next((name for name in tensors if name.startswith("lm_head.")), None)
    if head is not None and "lm_head.weight" not in tensors and not (model.tie_word_embeddings or model.embeds):
        raise ConfigError(f"{head}: a quantised head is not supported; use a checkpoint whose head is plain")
    if stored_as is not None and stored_as.method == "gptq":
        _check_column_order(stored_as.group_size, tensors)
    for name, stored in tensors.items():
        found = _OF_TEXT.fullmatch(name)
        if found is None or (found["layer"] and int(found["layer"]) in model.recurrent_layers):
            continue
        suffix = found["inside"] or found["outside"] or found["head"]
        if (wanted := shapes.get(suffix)) is None:
            continue
        if stored.shape != wanted:
            raise ConfigError(
                f"weight {name} has shape {list(stored.shape)}, config.json asks for {list(wanted)}; the weights and"
                " config.json belong to different models"
            )
        if is_plain and stored.dtype not in _FLOATS:
            raise ConfigError(
                f"weight {name} is {stored.dtype}, and config.json names no quantisation; use the model's unquantised"
                " weights"
            )


def _check_column_order(group: int, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ``ConfigError`` if the first matrix has groups of columns that are not adjacent. The process that loads
    the weights checks all of them."""
    found = ((name, stored) for name, stored in tensors.items() if name.endswith(".g_idx"))
    name, stored = next(found, ("", None))
    if stored is None or stored.dtype != "I32":
        return
    with safe_open(stored.file, framework="numpy") as file:
        order = file.get_tensor(name).tolist()
    if any(number != (column // group if group > 0 else 0) for column, number in enumerate(order)):
        raise ConfigError(
            f"{name}: columns are in the order of activations (desc_act), which is not supported; use a checkpoint"
            " without it"
        )


def weight_bytes(model: ModelConfig, tensors: Mapping[str, StoredTensor]) -> int:
    """Bytes of ``model``'s weights as they are stored in memory, all ranks together. It is never too large: tensors
    that are not loaded do not count, and small ones that grow do not either."""
    on_line = 0.0
    if model.quantization is not None and model.quantization.method == ON_LINE_METHOD:
        on_line = _ON_LINE_BYTES[model.quantization.kind]
    per_number = 4 if model.dtype == "float32" else 2
    total = 0.0
    for name, stored in tensors.items():
        found = _OF_TEXT.fullmatch(name)
        if found is None or (found["head"] and (model.tie_word_embeddings or model.embeds)) or name.endswith(_NOT_KEPT):
            continue
        if found["layer"] and int(found["layer"]) >= model.num_layers:
            continue
        if stored.dtype not in _FLOATS or not name.endswith((".weight", ".bias")):
            total += stored.nbytes
        elif on_line and found["layer"] and len(stored.shape) > 1:
            total += math.prod(stored.shape) * on_line
        else:
            total += math.prod(stored.shape) * per_number
    return int(total)


def check_fits(model: ModelConfig, needed: int, free: int, where: str, remedies: Sequence[str]) -> None:
    """Raises ``ConfigError`` with the remedies if ``needed`` bytes of weights are more than the ``free`` ones of
    ``where``. ``remedies``: those of this place."""
    if needed <= free:
        return
    choices = [*remedies, "a smaller model"]
    stored = "as they are quantised"
    if model.quantization is None:
        stored = f"in {model.dtype}"
        choices.insert(0, "--quantization fp8 or int4")
        if model.dtype == "float32":
            choices.insert(0, "--dtype bfloat16")
    elif model.quantization.method == ON_LINE_METHOD:
        stored = f"in {model.quantization.kind}"
    raise ConfigError(
        f"its weights need {needed / 1e9:.1f} GB {stored}, and {where} has {free / 1e9:.1f} free; use"
        f" {', '.join(choices[:-1])}{',' * (len(choices) > 2)} or {choices[-1]}"
    )


def machine_free_bytes() -> int:
    available: int = psutil.virtual_memory().available
    return available


def gpu_free_bytes() -> int | None:
    """The free memory of that GPU of this machine which has the most; None if the driver does not say. It is asked
    without CUDA, which would take half a gigabyte of the GPU for this process."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        most = 0
        for index in range(count.value):
            handle, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                nvml.nvmlDeviceGetMemoryInfo(handle, sizes)
                most = max(most, sizes[1])
        return most or None
    finally:
        nvml.nvmlShutdown()
