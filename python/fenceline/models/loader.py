"""load_model and load_draft_model: make a model on its device from a model directory, reading its files one by one.

A GGUF file (models/gguf_weights.py) is read like a safetensors file with the same tensors.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from fenceline.config.draft_config import DraftConfig, SpeculativeAlgorithm
from fenceline.config.gguf_file import is_gguf
from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import CONVERT, CONVERT_DRAFT, weight_files
from fenceline.config.quantization import QuantConfig
from fenceline.layers.context import LayerContext, Shard, torch_context
from fenceline.layers.quantized import COLUMN_ORDER
from fenceline.layers.rotary import choice_by_length
from fenceline.layers.weight import ADDED, WeightSlots
from fenceline.models.decoder import CausalLM, mtp_modules
from fenceline.models.draft import DraftModel
from fenceline.models.draft_families import make_draft_model
from fenceline.models.families import make_model
from fenceline.models.gguf_weights import GGUFWeights

_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")  # of the target's, in layers that predict further tokens
# With the prefixes that models have which see images too. Layers that predict further tokens may have copies.
_HEAD_AND_EMBEDDING = ("lm_head.weight", "model.embed_tokens.weight", "language_model.embed_tokens.weight")
_LOG_EVERY_S = 10.0
_DUMMY_STD = 0.02  # the standard deviation that most families are initialised with


logger = logging.getLogger(__name__)


def load_model(
    config: ModelConfig, load_format: str, device: torch.device, context: LayerContext, seed: int, progress: bool
) -> CausalLM:
    """The model of ``config`` on ``device``, its layers made with ``context``. ``load_format``: ``auto`` and
    the names of formats read the weights in ``config.model_path``, ``dummy`` draws random weights from ``seed`` and
    reads no files. ``progress`` shows a progress bar on a terminal. Raises ``ValueError``, one line with the remedy,
    for files that are missing or damaged or do not fit the model."""
    files = _files(config.model_path, load_format)
    begin = time.perf_counter()
    if files:
        config = _with_stored_head(config, files)
        _check_headers(config, context.dtype, files)
    # Parameters are allocated directly on the device, because a large model may not fit in host memory.
    with torch.no_grad(), torch.device(device):
        context = dataclasses.replace(context, format=_stored_format(config, load_format))
        model = make_model(_as_stored(config, load_format), context)
        if load_format == "dummy":
            _randomise(model.weight_slots(), seed)
        else:
            model.load_weights(read_weights(files, progress, dtype=context.dtype, quantization=config.quantization))
    _log_loaded("weights", model.nbytes, files, begin)
    if choice := choice_by_length(config):
        logger.info("Rotary positions: %s", choice)
    return model


def load_draft_model(
    config: DraftConfig,
    load_format: str,
    device: torch.device,
    context: LayerContext,
    seed: int,
    progress: bool,
    target: CausalLM,
) -> DraftModel:
    """The draft of ``config`` for ``target``, on the target's device; otherwise like ``load_model``. In the KV pool its
    layers follow the target's. Also raises ``ValueError`` for a checkpoint without tensors that the algorithm needs."""
    config = dataclasses.replace(config, model=_as_stored(config.model, load_format))
    directory = config.model.model_path
    files = _files(directory, load_format, CONVERT_DRAFT)
    begin = time.perf_counter()
    if files and config.algorithm is SpeculativeAlgorithm.STANDALONE:
        config = dataclasses.replace(config, model=_with_stored_head(config.model, files))
        _check_headers(config.model, context.dtype, files)
    context = dataclasses.replace(context, format=_stored_format(config.model, load_format))
    with torch.no_grad(), torch.device(device):
        if load_format == "dummy":
            draft = make_draft_model(config, context, target, dummy_names(config, target))
            _randomise(draft.weight_slots(), seed)
        else:
            names = DraftNames(config)
            present = frozenset(names.inside(name) for name in weight_names(files) if names.wanted(name))
            names.check(present, directory)
            draft = make_draft_model(config, context, target, present)
            weights = read_weights(files, progress, names.wanted, context.dtype)
            draft.load_weights((names.inside(name), tensor) for name, tensor in weights)
        draft.weights_loaded()
    _log_loaded("the draft's weights", draft.nbytes, files, begin)
    return draft


def _with_stored_head(config: ModelConfig, files: Sequence[Path]) -> ModelConfig:
    """``config``, untied if it says that the head is the embedding and ``files`` have another head. The stored weights
    are the model that was trained, so they decide, as in transformers."""
    if config.embeds or not config.tie_word_embeddings or not _stores_another_head(files):
        return config
    logger.warning(
        "config.json says tie_word_embeddings, but lm_head.weight is not the embedding: the stored head is used"
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _stores_another_head(files: Sequence[Path]) -> bool:
    """Whether ``files`` have both an embedding and a head, with different values."""
    found: dict[str, torch.Tensor] = {}
    if not any(name.endswith("lm_head.weight") for name in weight_names(files)):
        return False
    for path in files:
        with _naming(path), _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if name.endswith(_HEAD_AND_EMBEDDING):
                    found[name.split(".")[-2]] = file.get_tensor(name)
    head, embedding = found.get("lm_head"), found.get("embed_tokens")
    if head is None or embedding is None:
        return False
    if head.dtype != embedding.dtype:
        head, embedding = head.float(), embedding.float()
    return not torch.equal(head, embedding)


def _check_headers(config: ModelConfig, dtype: torch.dtype, files: Sequence[Path]) -> None:
    """Raises ``ValueError`` if the sizes in config.json are not those of the tensors in ``files``. It reads only the
    files' headers and allocates nothing, however large the sizes are."""
    context = dataclasses.replace(torch_context(Shard(), dtype), format=config.quantization)
    with torch.device("meta"):
        model = make_model(dataclasses.replace(config, context_length=1), context)
        stored = _read_headers(files, with_values=False, quantization=config.quantization)
        model.load_weights(stored, only_check=True)


class DraftNames:
    """How the tensors of a draft are named in its checkpoint."""

    def __init__(self, config: DraftConfig) -> None:
        self._algorithm = config.algorithm
        self._eagle = config.algorithm in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)
        self._of_mtp: tuple[str, ...] = ()
        if config.algorithm is SpeculativeAlgorithm.NEXTN:
            self._of_mtp = mtp_modules(config.model, config.model.layer_indices)

    def wanted(self, name: str) -> bool:
        """Whether the tensor belongs to the draft. The layers of NEXTN are in the same files as the target's. By their
        definition they have its embedding and head; copies of these are not read."""
        if not self._of_mtp:
            return True
        return name.startswith(self._of_mtp) and not name.endswith(_COPIES)

    def inside(self, name: str) -> str:
        """The tensor's name in the draft model. Some conversions of EAGLE checkpoints add the prefix ``model.``."""
        return name.removeprefix("model.") if self._eagle else name

    def check(self, present: Set[str], directory: str) -> None:
        """Raises ``ValueError`` for a checkpoint that is not a draft of this algorithm. ``present``: the names in the
        draft model of the tensors that it has."""
        if self._eagle and "fc.weight" not in present:
            raise ValueError(
                f"{directory}: no {self._algorithm.value} checkpoint, it lacks fc.weight; a whole model drafts with"
                " --speculative-algorithm STANDALONE"
            )
        if self._algorithm is SpeculativeAlgorithm.NEXTN and not present:
            raise ValueError(
                f"{directory}: lacks the tensors {self._of_mtp[0]}*, the layers that predict further tokens; download"
                " the model again, or one that has them"
            )


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that replace a model's: a whole checkpoint in ``directory``, or ``file``, a safetensors file with some
    tensors. ``label`` is the new --weight-version; None: it does not change. ``update_id`` names this update and with
    it weights that no checkpoint describes."""

    update_id: str
    directory: str | None = None
    file: str | None = None
    label: str | None = None

    @property
    def partly(self) -> bool:
        """Whether only some of the weights are replaced."""
        return self.directory is None

    def files(self) -> list[Path]:
        """The files to read. Raises ``ValueError`` if there are none."""
        if self.directory is not None:
            return weight_files(Path(self.directory))
        assert self.file is not None, "a checkpoint or a file"
        return [Path(self.file)]


def check_weights(model: CausalLM, weights: NewWeights) -> None:
    """Raises ``ValueError`` if ``weights`` do not fit ``model``. Reads the files' headers, and only those values that
    decide whether a format is supported or the model shares its head with the embedding."""
    files = weights.files()
    stored = _read_headers(files, quantization=model.config.quantization)
    model.load_weights(stored, weights.partly, only_check=True)
    if model.lm_head is model.embed_tokens and not model.config.embeds and _stores_another_head(files):
        raise ValueError(
            "lm_head.weight is not the embedding, which the model that is served has as its head; start a server with"
            " these weights"
        )


def replace_weights(model: CausalLM, weights: NewWeights, one_more: Callable[[], None]) -> None:
    """Copy ``weights``, which must have passed ``check_weights``, into ``model``'s parameters, on the current stream.
    The parameters keep their addresses. ``one_more`` is called before each tensor; if it raises, some weights are new
    and others are not."""
    files = weights.files()
    begin = time.perf_counter()

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        dtype, quantization = model.context.dtype, model.config.quantization
        for named in read_weights(files, progress=False, dtype=dtype, quantization=quantization):
            one_more()
            yield named

    with torch.no_grad():
        model.load_weights(read(), weights.partly)
    _log_loaded("new weights", model.nbytes, files, begin)


def _stored_format(config: ModelConfig, load_format: str) -> QuantConfig | None:
    """The format in which weights are read: the checkpoint's. Dummy weights are drawn as plain numbers and rounded."""
    quantization = config.quantization
    return quantization.on_line() if quantization is not None and load_format == "dummy" else quantization


def _as_stored(config: ModelConfig, load_format: str) -> ModelConfig:
    """``config``, in which the same applies to experts with a format of their own."""
    experts = config.experts
    if experts is None or experts.format is None or load_format != "dummy":
        return config
    return dataclasses.replace(config, experts=dataclasses.replace(experts, format=experts.format.on_line()))


def dummy_names(config: DraftConfig, target: CausalLM) -> frozenset[str]:
    """The tensors that a checkpoint of such a draft must have because the target's have another size."""
    model = config.model
    if model.hidden_size != target.config.hidden_size:
        return frozenset({"embed_tokens.weight", "lm_head.weight"})
    has_head = config.token_map is None and config.draft_vocab_size not in (None, model.vocab_size)
    return frozenset({"lm_head.weight"} if has_head else ())


def _files(directory: str, load_format: str, convert: str = CONVERT) -> list[Path]:
    if load_format not in ("auto", "safetensors", "gguf", "dummy"):
        raise ValueError(f"--load-format {load_format} is not supported; use auto, safetensors, gguf or dummy")
    return [] if load_format == "dummy" else weight_files(Path(directory), convert)


def _log_loaded(what: str, num_bytes: int, files: Sequence[Path], begin: float) -> None:
    source = f"{len(files)} file{'s' if len(files) > 1 else ''}" if files else "a seed"
    seconds = time.perf_counter() - begin
    logger.info("Loaded %s: %.2f GiB, from %s, in %.1f s", what, num_bytes / 2**30, source, seconds)


def weight_names(files: Sequence[Path]) -> list[str]:
    """The names of all tensors of ``files``, from the files' headers."""
    return [name for path in files for name in _names_in(path)]


def _opened(
    path: Path, dtype: torch.dtype = torch.float32, quantization: QuantConfig | None = None
) -> AbstractContextManager[Any]:
    """The file at ``path``, with the methods of safetensors. Quantised numbers of a GGUF file become ``dtype``, on the
    default device, unless they are kept according to ``quantization``."""
    return GGUFWeights(path, dtype, quantization) if is_gguf(path) else safe_open(path, framework="pt", device="cpu")


def _names_in(path: Path) -> list[str]:
    with _naming(path), _opened(path) as file:
        return list(file.keys())


# The names of types in the headers of safetensors files.
_HEADER_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _read_headers(
    files: Sequence[Path], with_values: bool = True, quantization: QuantConfig | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor without values) for every tensor of ``files``. ``with_values``: the order of GPTQ's columns has
    values, and so have tensors that do not matter if they are zero."""
    for path in files:
        with _naming(path), _opened(path, quantization=quantization) as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if with_values and name.endswith((COLUMN_ORDER, *ADDED)):
                    yield name, file.get_tensor(name)
                    continue
                described = file.get_slice(name)
                dtype = _HEADER_TYPES.get(described.get_dtype())
                if dtype is None:
                    raise ValueError(f"{path}: {name} is {described.get_dtype()}, which no parameter holds")
                yield name, torch.empty(described.get_shape(), dtype=dtype, device="meta")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of reading ``path`` into ``ValueError`` that name it."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or damaged ({error}); download the file again") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_weights(
    files: Sequence[Path],
    progress: bool,
    wanted: Callable[[str], bool] = lambda name: True,
    dtype: torch.dtype = torch.float32,
    quantization: QuantConfig | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every ``wanted`` tensor of ``files``. Tensors are memory-mapped on the CPU and valid until the
    next one is taken; ``dtype`` and ``quantization``: see ``_opened``. ``progress``
    shows a progress bar on a terminal; otherwise the log gets a line at the beginning of a file, at most one every
    10 s."""
    total_bytes = sum(path.stat().st_size for path in files)
    said = time.perf_counter()
    with tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=None if progress else True,  # None: disabled unless the output is a terminal
    ) as bar:
        for number, path in enumerate(files, start=1):
            bar.set_postfix_str(f"file {number}/{len(files)}")
            if bar.disable and time.perf_counter() - said >= _LOG_EVERY_S:
                said = time.perf_counter()
                logger.info("Loading weights: file %d of %d", number, len(files))
            # safetensors ignores torch's default device, so its tensors are on the CPU.
            with _naming(path), _opened(path, dtype, quantization) as file:
                for name in filter(wanted, file.keys()):
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    bar.update(file.nbytes(name) if isinstance(file, GGUFWeights) else tensor.nbytes)
        bar.update(total_bytes - bar.n)  # the files' headers and the tensors that were not wanted


def _randomise(slots: WeightSlots, seed: int) -> None:
    """Fill the parameters so that activations stay of moderate size: norms with ones, biases with zeros, all others
    with small noise. A tensor's values depend only on ``seed`` and its name, so the ranks of one model hold parts of
    the same matrices."""
    bound = _DUMMY_STD * 3**0.5
    for name, slot in slots.items():
        if name.endswith("bias"):
            slot.dest.zero_()
        elif slot.dest.dim() == 1:
            slot.dest.fill_(1.0)
        else:
            generator = torch.Generator(slot.dest.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            values = torch.empty(slot.full_shape, dtype=slot.dtype)
            slot.load(name, values.uniform_(-bound, bound, generator=generator))
