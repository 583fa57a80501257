"""QuantConfig: the number format of linear layers, from a checkpoint's quantization_config or made while loading.

The published formats are defined by Hugging Face transformers (fp8, awq, gptq) and the package compressed-tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fenceline.config import ConfigError
from fenceline.config.model_files import is_file, read_json_object

ON_LINE = ("fp8", "int4")  # what --quantization makes of plain weights
ON_LINE_METHOD = "on-line"
CHECKPOINT_METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
INT4_GROUPS = (32, 64, 128)
_E4M3 = ("e4m3", "float8_e4m3fn")  # what DeepSeek and MiniMax call it
MXFP4_GROUP = 32  # this many numbers of a row share an exponent
FP8_BLOCK = 128  # rows and columns of a block that has one scale
# Matrices that some checkpoints store fused, and their parts.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The number format of a model's linear layers. Embeddings, the head, norms and the linear layers for which
    ``leaves_plain`` is true stay in the model's dtype.

    ``method`` says how the tensors are named and packed: ``fp8``, ``compressed-tensors``, ``awq`` or ``gptq``. With
    ``on-line`` the checkpoint is plain, and its matrices are rounded while they are loaded. ``kind`` is the type of the
    numbers: ``fp8`` is E4M3, ``int4`` integers of four bits, and ``mxfp4`` E2M1, which only experts have.

    For fp8, ``scales`` says for what there is one scale: each ``tensor``, output ``channel`` or ``block`` of 128 x 128.
    ``static_input``: the checkpoint has a scale for the input of each layer; otherwise a kernel that multiplies in fp8
    computes scales from its input.

    For int4, ``group_size`` numbers along a row share a scale and a zero point. ``has_zeros``: a compressed-tensors
    checkpoint stores zero points; otherwise they are 8. ``zero_offset`` is added to the zero points of gptq,
    to words of eight at once: where one has been 0, subtracting has borrowed from the next.

    ``has_kv_scales``: the checkpoint has a scale for the keys and one for the values of each layer, for a KV cache in
    FP8.

    ``plain`` lists the modules that the checkpoint leaves unquantised. ``only``, if it is not empty, lists those that
    are quantised: the others are plain.
    """

    method: str
    kind: str
    scales: str = "channel"
    static_input: bool = False
    group_size: int = INT4_GROUPS[-1]
    has_zeros: bool = False
    zero_offset: int = 0
    has_kv_scales: bool = False
    plain: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def leaves_plain(self, module: str) -> bool:
        """Whether the linear layer ``module`` (such as ``model.layers.0.mlp.up_proj``) is not quantised. The entries of
        the lists are names or parts of names that consist of whole components, in which ``*`` stands for anything, or
        regular expressions after ``re:``, which must match from the beginning of the name on."""
        return _lists(self.plain, module) or bool(self.only and not _lists(self.only, module))

    def on_line(self) -> QuantConfig:
        """The same format, made from plain weights, which dummy weights are."""
        return dataclasses.replace(self, method=ON_LINE_METHOD, static_input=False, has_kv_scales=False)


def read_quantization(
    hf: Mapping[str, object], directory: Path, asked: str | None = None
) -> QuantConfig | None:
    """The format of the checkpoint in ``directory`` with the config.json ``hf``; None for plain weights.

    ``asked`` is --quantization: a format to make on-line, or the name of the checkpoint's own. Raises ``ConfigError``
    with the remedy for a format that cannot be served.
    """
    name, fields = _stated(hf, directory)
    if name is None:
        if asked in (None, *ON_LINE):
            return None if asked is None else _on_line(str(asked))
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is not quantised; leave it out, or use {' or '.join(ON_LINE)},"
            " which are made while it is loaded"
        )
    reader = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "awq": _read_awq,
        "gptq": _read_gptq,
    }.get(name)
    if reader is None:
        raise _refusal(name, f"which is not supported ({', '.join(CHECKPOINT_METHODS)} are)")
    if asked not in (None, name):
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is quantised already ({name}); leave it out"
        )
    config, plain = reader(name, fields)
    _check_patterns(name, plain)
    return dataclasses.replace(config, plain=tuple(plain), has_kv_scales=_has_kv_scales(name, fields))


def read_mxfp4(hf: Mapping[str, object], asked: str | None) -> QuantConfig | None:
    """The format of the experts where config.json says that they are MXFP4, and nothing else is. Raises
    ``ConfigError`` where ``asked``, --quantization, says otherwise."""
    entry = hf.get("quantization_config")
    if not isinstance(entry, Mapping) or entry.get("quant_method") != "mxfp4":
        return None
    if asked not in (None, "mxfp4"):
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is quantised already (mxfp4); leave it out"
        )
    return QuantConfig(method="mxfp4", kind="mxfp4", group_size=MXFP4_GROUP)


def _on_line(kind: str) -> QuantConfig:
    return QuantConfig(method=ON_LINE_METHOD, kind=kind)


def _stated(hf: Mapping[str, object], directory: Path) -> tuple[str | None, Mapping[str, object]]:
    """The method and its settings. Each tool has a place of its own for what it did; modelopt and some others write a
    file beside config.json."""
    for key in ("quantization_config", "compression_config"):
        entry = hf.get(key)
        if entry:
            fields = entry if isinstance(entry, Mapping) else {}
            bits = next((name for name in ("load_in_4bit", "load_in_8bit") if fields.get(name)), None)
            method = fields.get("quant_method") or (bits and "bitsandbytes") or fields.get("quant_algo")
            return str(method or "a method that config.json does not name"), fields
    if is_file(directory / "hf_quant_config.json"):
        entry = read_json_object(directory / "hf_quant_config.json").get("quantization")
        algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else None
        return f"modelopt {algorithm}" if algorithm else "modelopt", {}
    return None, {}


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is quantised ({name}), {reason}; use the model's unquantised weights, with --quantization"
        f" {' or '.join(ON_LINE)} if they are too large"
    )


def _has_kv_scales(name: str, fields: Mapping[str, object]) -> bool:
    scheme = fields.get("kv_cache_scheme")
    if scheme is None:
        return False
    wanted: dict[str, object] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    if not isinstance(scheme, Mapping) or any(scheme.get(key) != value for key, value in wanted.items()):
        raise _refusal(name, "with a kv_cache_scheme other than one static scale of fp8 for each tensor")
    return True


def _strings(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _read_fp8(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    scheme, block = fields.get("activation_scheme", "dynamic"), fields.get("weight_block_size")
    if fields.get("fmt", "e4m3") not in _E4M3:
        raise _refusal(name, f"with numbers of the format {fields['fmt']}, of which only e4m3 is supported")
    if scheme not in ("dynamic", "static"):
        raise _refusal(name, f"with the activation_scheme {scheme!r}, which is neither dynamic nor static")
    if block is not None and block != [FP8_BLOCK, FP8_BLOCK]:
        raise _refusal(name, f"in blocks of {block}, of which only [{FP8_BLOCK}, {FP8_BLOCK}] is supported")
    config = QuantConfig(
        method=name,
        kind="fp8",
        scales="tensor" if block is None else "block",
        static_input=scheme == "static",
    )
    return config, _strings(fields.get("modules_to_not_convert")) + _strings(fields.get("ignored_layers"))


def _read_compressed_tensors(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    groups = fields.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise _refusal(name, "with several config_groups or none, of which one is supported")
    if group.get("targets") != ["Linear"]:
        raise _refusal(
            name, f"with the targets {group.get('targets')}, of which only ['Linear'] is supported"
        )
    inputs = group.get("input_activations")
    ignored = _strings(fields.get("ignore"))
    if (weights.get("type"), weights.get("num_bits")) == ("float", 8):
        return _compressed_fp8(name, weights, inputs), ignored
    if (weights.get("type"), weights.get("num_bits")) == ("int", 4):
        return _compressed_int4(name, weights, inputs, fields.get("format")), ignored
    raise _refusal(
        name,
        f"with weights of {weights.get('num_bits')} bits ({weights.get('type')}), of which fp8 and int4 are supported",
    )


def _compressed_int4(
    name: str, weights: Mapping[str, object], inputs: object, packing: object
) -> QuantConfig:
    if inputs is not None or packing not in (None, "pack-quantized"):
        raise _refusal(
            name, f"with 4 bits as {packing} and rounded input, of which only packed weights are supported"
        )
    if weights.get("strategy") != "group" or weights.get("actorder") not in (None, False, "static", "weight"):
        raise _refusal(name, "with columns of 4 bits in groups that are not adjacent, which is not supported")
    return QuantConfig(
        method=name,
        kind="int4",
        group_size=_group_size(name, weights),
        has_zeros=weights.get("symmetric") is False,
    )


def _group_size(name: str, fields: Mapping[str, object]) -> int:
    size = fields.get("group_size")
    if size not in INT4_GROUPS or not isinstance(size, int):
        raise _refusal(
            name, f"in groups of {size}, of which {', '.join(map(str, INT4_GROUPS))} are supported"
        )
    return size


def _check_bits(name: str, fields: Mapping[str, object]) -> None:
    bits = fields.get("bits", fields.get("w_bit"))
    if bits != 4:
        raise _refusal(name, f"with {bits} bits, of which 4 are supported")


def _read_awq(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    _check_bits(name, fields)
    if str(fields.get("version", "gemm")).lower() != "gemm" or fields.get("zero_point") is False:
        raise _refusal(
            name, f"packed as {fields.get('version')}, of which gemm with zero points is supported"
        )
    config = QuantConfig(method=name, kind="int4", group_size=_group_size(name, fields))
    return config, _strings(fields.get("modules_to_not_convert"))


def _read_gptq(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    _check_bits(name, fields)
    entry = fields.get("dynamic")
    dynamic = [str(key) for key in entry] if isinstance(entry, Mapping) else []
    if fields.get("desc_act") or any(not key.startswith("-:") for key in dynamic):
        raise _refusal(
            name,
            "in the order of activations (desc_act) or in several ways (dynamic), which is not supported",
        )
    packing = fields.get("checkpoint_format", "gptq")
    if packing not in ("gptq", "gptq_v2"):
        raise _refusal(name, f"packed as {packing}, of which gptq and gptq_v2 are supported")
    if fields.get("lm_head"):
        raise _refusal(name, "with its head, which must be plain")
    offset = int(packing == "gptq")  # the first version stores a zero point less one
    blocks = fields.get("modules_in_block_to_quantize")
    only = [module for block in blocks for module in _strings(block)] if isinstance(blocks, Sequence) else []
    config = QuantConfig(
        method=name, kind="int4", group_size=_group_size(name, fields), zero_offset=offset, only=tuple(only)
    )
    left_out = [f"re:{key.removeprefix('-:')}" for key in dynamic]
    return config, left_out + _strings(fields.get("modules_to_not_convert"))


def _compressed_fp8(name: str, weights: Mapping[str, object], inputs: object) -> QuantConfig:
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy not in ("tensor", "channel", "block"):
        raise _refusal(
            name, f"with a scale for each {strategy}, of which tensor, channel and block are supported"
        )
    if strategy == "block" and block not in ([FP8_BLOCK, FP8_BLOCK], f"{FP8_BLOCK}x{FP8_BLOCK}"):
        raise _refusal(name, f"in blocks of {block}, of which only [{FP8_BLOCK}, {FP8_BLOCK}] is supported")
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    return QuantConfig(method=name, kind="fp8", scales=str(strategy), static_input=static)


def _check_patterns(name: str, listed: Sequence[str]) -> None:
    for pattern in listed:
        try:
            _parsed((pattern,))
        except re.error as error:
            raise _refusal(name, f"except {pattern!r}, which is no regular expression ({error})") from None


def _lists(listed: tuple[str, ...], module: str) -> bool:
    names, patterns = _parsed(listed)
    if not names.isdisjoint(_runs(module)) or _match(patterns, module):
        return True
    parent, _, last = module.rpartition(".")
    fused = next((fused for fused, parts in FUSED.items() if last in parts), None)
    if fused is None:
        return False
    whole, parts = f"{parent}.{fused}", [f"{parent}.{part}" for part in FUSED[fused]]
    if not names.isdisjoint(_runs(whole)):
        return True
    # A pattern that names a part, as .*v_proj does, matches .qkv_proj by chance.
    return any(
        _match([pattern], whole) and not any(_match([pattern], part) for part in parts)
        for pattern in patterns
    )


def _match(patterns: Sequence[re.Pattern[str]], module: str) -> bool:
    """Whether one matches ``module``, or one of the names that it has in a model that sees images too."""
    names = (module, f"language_model.{module}", module.replace("model.", "model.language_model.", 1))
    return any(pattern.match(name) for pattern in patterns for name in names)


@functools.cache
def _parsed(listed: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    patterns = [entry.removeprefix("re:") for entry in listed if entry.startswith("re:")]
    with_stars = [entry for entry in listed if "*" in entry and not entry.startswith("re:")]
    patterns += [re.escape(entry).replace(r"\*", ".*") + r"(\.|$)" for entry in with_stars]
    names = {entry for entry in listed if not entry.startswith("re:")}.difference(with_stars)
    of_text = frozenset(name.replace("language_model.", "", 1) for name in names)
    return of_text, tuple(re.compile(pattern) for pattern in patterns)


def _runs(module: str) -> Iterator[str]:
    """All runs of adjacent components of a dotted name. Looking them up takes no longer for a list of hundreds of
    modules, as a mixture of experts has it."""
    parts = module.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])
