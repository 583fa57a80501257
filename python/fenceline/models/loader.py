"""load_model: makes a model on its device from a model directory; the weights are read file by file."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from fenceline.config.model_config import ModelConfig
from fenceline.config.model_files import weight_files
from fenceline.layers.context import LayerContext
from fenceline.models.decoder import CausalLM
from fenceline.models.registry import make_model

_LOG_EVERY_S = 10.0
_DUMMY_STD = 0.02  # the standard deviation that most families are initialised with


logger = logging.getLogger(__name__)


def load_model(
    config: ModelConfig,
    load_format: str,
    device: torch.device,
    context: LayerContext,
    seed: int,
    progress: bool,
) -> CausalLM:
    """The model of ``config`` on ``device``, its layers made with ``context``.

    ``load_format``: ``auto`` and ``safetensors`` read ``*.safetensors`` from ``config.model_path``, ``dummy`` draws
    random weights from ``seed`` and reads nothing. ``progress`` shows a bar on a terminal. Raises ``ValueError``, one
    line with the remedy, for missing, damaged or unfitting files.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ValueError(f"--load-format {load_format} is not supported; use auto, safetensors or dummy")
    begin = time.perf_counter()
    files = [] if load_format == "dummy" else weight_files(Path(config.model_path))
    # Parameters are allocated on the device at once: a large model may not fit host memory.
    with torch.no_grad(), torch.device(device):
        model = make_model(config, context)
        if load_format == "dummy":
            _randomise(model, seed)
        else:
            model.load_weights(read_weights(files, progress))
    source = f"{len(files)} file{'s' if len(files) > 1 else ''}" if files else "a seed"
    num_bytes = model.nbytes
    seconds = time.perf_counter() - begin
    logger.info("Loaded weights: %.2f GiB, from %s, in %.1f s", num_bytes / 2**30, source, seconds)
    return model


def read_weights(files: Sequence[Path], progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every tensor of ``files``: memory-mapped on the CPU, valid until the next one is taken.
    ``progress`` shows a bar on a terminal; in a log a line names every file that begins 10 s or more after the last."""
    total_bytes = sum(path.stat().st_size for path in files)
    said = time.perf_counter()
    with tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=None if progress else True,  # None: off a terminal
    ) as bar:
        for number, path in enumerate(files, start=1):
            bar.set_postfix_str(f"file {number}/{len(files)}")
            if bar.disable and time.perf_counter() - said >= _LOG_EVERY_S:
                said = time.perf_counter()
                logger.info("Loading weights: file %d of %d", number, len(files))
            try:
                # safetensors ignores torch's default device, so its tensors are on the CPU.
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                        tensor = file.get_tensor(name)
                        yield name, tensor
                        bar.update(tensor.nbytes)
            except SafetensorError as error:
                raise ValueError(f"{path}: truncated or damaged ({error}); download the file again") from None
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
        bar.update(total_bytes - bar.n)  # the files' headers


def _randomise(model: CausalLM, seed: int) -> None:
    """Fill the parameters so that activations stay of moderate size: ones for norms, zeros for biases, small noise
    elsewhere.

    A tensor's values depend on ``seed`` and its name alone, so the ranks of one model hold parts of the same matrices.
    """
    bound = _DUMMY_STD * 3**0.5
    for name, slot in model.weight_slots().items():
        if name.endswith("bias"):
            slot.dest.zero_()
        elif slot.dest.dim() == 1:
            slot.dest.fill_(1.0)
        else:
            generator = torch.Generator(slot.dest.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            values = torch.empty(slot.full_shape, dtype=slot.dest.dtype)
            slot.load(name, values.uniform_(-bound, bound, generator=generator))
