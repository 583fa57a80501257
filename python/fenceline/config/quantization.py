"""QuantConfig: the number format of linear layers, from a checkpoint's quantization_config or made while loading.

The published formats are defined by Hugging Face transformers (fp8, awq, gptq) and the package compressed-tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fenceline.config import ConfigError
from fenceline.config.gguf_file import is_gguf
from fenceline.config.gguf_model import GROUP, StoredPiece, four_bit_modules, stored_pieces
from fenceline.config.model_files import is_file, read_json_object

ON_LINE = ("fp8", "int4")  # what --quantization makes of plain weights
ON_LINE_METHOD = "on-line"
CHECKPOINT_METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
INT4_GROUPS = (32, 64, 128)
WHOLE_ROWS = -1  # the group size of a format with one scale for each row
INT8_GROUP = 128
_E4M3 = ("e4m3", "float8_e4m3fn")  # what DeepSeek and MiniMax call it
# What scale_fmt may say. With ue8m0 (DeepSeek-V3.1) scales are powers of two, but stored as float32; those of inputs,
# which are computed here, are finer.
_SCALES = (None, "float", "ue8m0")
MXFP4_GROUP = 32  # this many numbers of a row share an exponent
FP8_BLOCK = 128  # rows and columns of a block that has one scale
# Matrices that some checkpoints store fused, and their parts.
FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v")),
    ("in_proj", ("in_proj_gate", "in_proj_output", "in_proj_input")),
    ("in_proj", ("in_proj_gates", "in_proj_values", "in_proj_keys", "in_proj_queries", "in_proj_steps")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """The number format of a model's linear layers. Embeddings, the head, norms and the linear layers for which
    ``leaves_plain`` is true stay in the model's dtype.

    ``method`` says how the tensors are named and packed: ``fp8``, ``compressed-tensors``, ``awq`` or ``gptq``. With
    ``on-line`` the checkpoint is plain, and its matrices are rounded while they are loaded. ``kind`` is the type of the
    numbers: ``fp8`` is E4M3, ``int8`` and ``int4`` are integers of eight and four bits, and ``mxfp4`` is E2M1, which
    only experts have.

    For fp8 and int8, ``scales`` says for what there is one scale: each ``tensor``, output ``channel`` or ``block`` of
    128 x 128, and for int8 also each ``group`` of 128 along a row. ``static_input``: the checkpoint has a scale for the
    input of each layer; otherwise a kernel that multiplies in fp8 computes scales from its input. ``packed``: four
    numbers of int8 are stored in a word of 32 bits.

    For int4, ``group_size`` numbers along a row, or WHOLE_ROWS, share a scale and a zero point. ``has_zeros``: the
    checkpoint says that it has zero points, which gptq always has. If it does not, they are 8, unless awq stores some
    all the same. ``zero_offset`` is added to the zero points of gptq, to words of eight at once: where one has been 0,
    subtracting has borrowed from the next.

    ``has_kv_scales``: the checkpoint has a scale for the keys and one for the values of each layer, for a KV cache in
    FP8.

    ``plain`` lists the modules that the checkpoint leaves unquantised. ``only``, if it is not empty, lists those that
    are quantised: the others are plain, or have one of the formats ``others``. ``stored_names``: see ``Family``.
    """

    method: str
    kind: str
    scales: str = "channel"
    static_input: bool = False
    group_size: int = INT4_GROUPS[-1]
    has_zeros: bool = False
    zero_offset: int = 0
    packed: bool = False
    has_kv_scales: bool = False
    plain: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    others: tuple[QuantConfig, ...] = ()
    stored_names: tuple[tuple[str, str], ...] = ()

    def of(self, module: str) -> QuantConfig | None:
        """The format of the linear layer ``module`` (such as ``model.layers.0.mlp.up_proj``); None: it is not
        quantised. The entries of the lists are names or parts of names that consist of whole components, in which ``*``
        stands for anything, or regular expressions after ``re:``, which must match from the name's beginning."""
        stored = f"{module}."
        for theirs, ours in self.stored_names:
            stored = stored.replace(ours, theirs)
        names = {module, stored[:-1]}
        for config in self.formats:
            if not _lists(config.plain, names) and (not config.only or _lists(config.only, names)):
                return config
        return None

    @property
    def formats(self) -> tuple[QuantConfig, ...]:
        """This format and ``others``."""
        return (self, *self.others)

    def with_names(self, stored_names: Mapping[str, str]) -> QuantConfig:
        """The same formats, with these ``stored_names``."""
        others = tuple(other.with_names(stored_names) for other in self.others)
        return dataclasses.replace(self, stored_names=tuple(stored_names.items()), others=others)

    def on_line(self) -> QuantConfig:
        """The same format, made from plain weights, which dummy weights are."""
        others = tuple(other.on_line() for other in self.others)
        return dataclasses.replace(self, method=ON_LINE_METHOD, static_input=False, has_kv_scales=False, others=others)


def read_quantization(hf: Mapping[str, object], directory: Path, asked: str | None = None) -> QuantConfig | None:
    """The format of the checkpoint in ``directory`` with the config.json ``hf``; None for plain weights. ``asked`` is
    --quantization: a format to make on-line, or the name of the checkpoint's own. Raises ``ConfigError`` with the
    remedy for a format that cannot be served."""
    name, fields = _stated(hf, directory)
    if asked == "gguf":
        return _four_bits(directory)
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
        raise ConfigError(f"--quantization {asked}: the checkpoint is quantised already ({name}); leave it out")
    config, plain = reader(name, fields)
    _check_patterns(name, plain)
    others = tuple(dataclasses.replace(other, plain=tuple(plain)) for other in config.others)
    return dataclasses.replace(config, plain=tuple(plain), has_kv_scales=_has_kv_scales(name, fields), others=others)


def _four_bits(directory: Path) -> QuantConfig:
    """The format of a GGUF file's matrices in Q4_0, which ``gguf_pieces`` packs as compressed-tensors does."""
    if not is_gguf(directory):
        raise ConfigError("--quantization gguf: the model is no GGUF file; leave it out")
    modules = four_bit_modules(directory)
    if not modules:
        raise ConfigError(
            "--quantization gguf: it keeps matrices in Q4_0 (queries, keys and values together, gate and up together,"
            " all experts of a layer), and the file has none; leave it out, or use int4, which rounds again"
        )
    return QuantConfig(method="compressed-tensors", kind="int4", group_size=GROUP, only=modules)


def gguf_pieces(path: Path, quantization: QuantConfig | None) -> dict[str, StoredPiece]:
    """The checkpoint's tensors in the GGUF file at ``path``, for a model with ``quantization``."""
    packed = quantization is not None and quantization.method == "compressed-tensors"
    return stored_pieces(path, quantization.of) if quantization is not None and packed else stored_pieces(path)


def read_mxfp4(hf: Mapping[str, object], asked: str | None) -> QuantConfig | None:
    """The format of the experts where config.json says that they are MXFP4, and nothing else is. Raises
    ``ConfigError`` where ``asked``, --quantization, says otherwise."""
    entry = hf.get("quantization_config")
    if not isinstance(entry, Mapping) or entry.get("quant_method") != "mxfp4":
        return None
    if asked not in (None, "mxfp4"):
        raise ConfigError(f"--quantization {asked}: the checkpoint is quantised already (mxfp4); leave it out")
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
    if fields.get("scale_fmt") not in _SCALES:
        raise _refusal(name, f"with scales of the format {fields['scale_fmt']}, which is not supported")
    if scheme not in ("dynamic", "static"):
        raise _refusal(name, f"with the activation_scheme {scheme!r}, which is neither dynamic nor static")
    if block is not None and block != [FP8_BLOCK, FP8_BLOCK]:
        raise _refusal(name, f"in blocks of {block}, of which only [{FP8_BLOCK}, {FP8_BLOCK}] is supported")
    config = QuantConfig(
        method=name, kind="fp8", scales="tensor" if block is None else "block", static_input=scheme == "static"
    )
    return config, _strings(fields.get("modules_to_not_convert")) + _strings(fields.get("ignored_layers"))


def _read_compressed_tensors(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    stated = fields.get("config_groups")
    groups = list(stated.values()) if isinstance(stated, Mapping) else []
    if not groups:
        raise _refusal(name, "without config_groups")
    formats = [_compressed_group(name, group, fields.get("format")) for group in groups]
    for config in formats:
        _check_patterns(name, config.only)
    if len([config for config in formats if not config.only]) > 1:
        raise _refusal(name, "with several config_groups for all linear layers, of which each may have one")
    # A group that names its modules has precedence over one for all of them.
    first, *others = sorted(formats, key=lambda config: not config.only)
    return dataclasses.replace(first, others=tuple(others)), _strings(fields.get("ignore"))


def _compressed_group(name: str, group: object, packing: object) -> QuantConfig:
    """The format of one of config_groups. ``packing`` is that of all groups, if they have no format of their own."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise _refusal(name, "with config_groups that do not describe weights")
    inputs, packing = group.get("input_activations"), group.get("format") or packing
    kind = weights.get("type"), weights.get("num_bits")
    if kind == ("float", 8):
        config = _compressed_fp8(name, weights, inputs)
    elif kind == ("int", 8):
        config = _compressed_int8(name, weights, inputs, packing)
    elif kind == ("int", 4):
        config = _compressed_int4(name, weights, inputs, packing)
    else:
        reason = f"with weights of {kind[1]} bits ({kind[0]}), of which fp8, int8 and int4 are supported"
        raise _refusal(name, reason)
    targets = _strings(group.get("targets"))
    if not targets:
        raise _refusal(name, f"with the targets {group.get('targets')!r}, which are no list of modules")
    return dataclasses.replace(config, only=() if "Linear" in targets else tuple(targets))


def _compressed_int8(name: str, weights: Mapping[str, object], inputs: object, packing: object) -> QuantConfig:
    if weights.get("symmetric") is False or weights.get("actorder") not in (None, False, "static", "weight"):
        raise _refusal(name, "with zero points or an order of activations for int8, which are not supported")
    if isinstance(inputs, Mapping) and (inputs.get("type"), inputs.get("num_bits")) != ("int", 8):
        raise _refusal(name, "with int8 for weights and another format for inputs, which is not supported")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("tensor", "channel") and (strategy, size) != ("group", INT8_GROUP):
        reason = f"with a scale of int8 for each {strategy} ({size}), of which tensor, channel and group (128) are"
        raise _refusal(name, f"{reason} supported")
    if packing not in (None, "pack-quantized", "int-quantized", "naive-quantized", "mixed-precision"):
        raise _refusal(name, f"with int8 as {packing}, of which int-quantized and pack-quantized are supported")
    packed = packing == "pack-quantized" or (packing != "int-quantized" and inputs is None)
    return QuantConfig(method=name, kind="int8", scales=str(strategy), packed=packed)


def _compressed_int4(name: str, weights: Mapping[str, object], inputs: object, packing: object) -> QuantConfig:
    if inputs is not None or packing not in (None, "pack-quantized", "mixed-precision"):
        raise _refusal(name, f"with 4 bits as {packing} and rounded input, of which only packed weights are supported")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _refusal(name, f"with a scale of int4 for each {strategy}, of which group and channel are supported")
    if weights.get("actorder") not in (None, False, "static", "weight"):
        raise _refusal(name, "with columns of 4 bits in groups that are not adjacent, which is not supported")
    return QuantConfig(
        method=name,
        kind="int4",
        group_size=WHOLE_ROWS if strategy == "channel" else _group_size(name, weights),
        has_zeros=weights.get("symmetric") is False,
    )


def _group_size(name: str, fields: Mapping[str, object]) -> int:
    size = fields.get("group_size")
    if size not in (*INT4_GROUPS, WHOLE_ROWS) or not isinstance(size, int):
        shown = ", ".join(map(str, (*INT4_GROUPS, WHOLE_ROWS)))
        raise _refusal(name, f"in groups of {size}, of which {shown} (whole rows) are supported")
    return size


def _check_bits(name: str, fields: Mapping[str, object]) -> None:
    bits = fields.get("bits", fields.get("w_bit"))
    if bits != 4:
        raise _refusal(name, f"with {bits} bits, of which 4 are supported")


def _read_awq(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    _check_bits(name, fields)
    if str(fields.get("version", "gemm")).lower() != "gemm":
        raise _refusal(name, f"packed as {fields.get('version')}, of which gemm is supported")
    config = QuantConfig(
        method=name, kind="int4", group_size=_group_size(name, fields), has_zeros=fields.get("zero_point") is not False
    )
    return config, _strings(fields.get("modules_to_not_convert"))


def _read_gptq(name: str, fields: Mapping[str, object]) -> tuple[QuantConfig, list[str]]:
    _check_bits(name, fields)
    entry = fields.get("dynamic")
    dynamic = [str(key) for key in entry] if isinstance(entry, Mapping) else []
    if any(not key.startswith("-:") for key in dynamic):
        raise _refusal(name, "in several ways (dynamic), which is not supported")
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
        raise _refusal(name, f"with a scale for each {strategy}, of which tensor, channel and block are supported")
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


def _lists(listed: tuple[str, ...], names: Iterable[str]) -> bool:
    """Whether it names a module that has several names."""
    return any(_names(listed, name) for name in names)


def _names(listed: tuple[str, ...], module: str) -> bool:
    names, patterns = _parsed(listed)
    if not names.isdisjoint(_runs(module)) or _match(patterns, module):
        return True
    parent, _, last = module.rpartition(".")
    found = next(((fused, parts) for fused, parts in FUSED if last in parts), None)
    if found is None:
        return False
    whole, parts = f"{parent}.{found[0]}", [f"{parent}.{part}" for part in found[1]]
    if not names.isdisjoint(_runs(whole)):
        return True
    # A pattern that names a part, as .*v_proj does, matches .qkv_proj by chance.
    return any(_match([pattern], whole) and not any(_match([pattern], part) for part in parts) for pattern in patterns)


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
