"""New weights for a running server: SGLang's /update_weights_from_disk and /update_weights_from_tensor.

Tensors travel to the scheduler's processes as a safetensors file, which they map into their memory.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fenceline.config.model_files import model_directory
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import ControlReply

if TYPE_CHECKING:  # front ends without such tensors do not load torch for them
    import torch

# Fields of SGLang's that change nothing here: caches are always emptied, graphs read the parameters where they are, and
# drafts keep their own weights.
WITHOUT_EFFECT = frozenset(
    (
        "flush_cache", "is_async", "torch_empty_cache", "recapture_cuda_graph", "token_step", "manifest",
        "disable_draft_model", "crash_dump_folder",
    )
)  # fmt: skip

_PIECE = 2**20  # characters of base64 that are decoded at once; a multiple of 4


class UpdateFromDiskBody(msgspec.Struct, forbid_unknown_fields=True):
    """/update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    keep_pause: bool = False


class UpdateFromTensorBody(msgspec.Struct, forbid_unknown_fields=True):
    """/update_weights_from_tensor."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


async def update_from_disk(manager: TokenizerManager, body: UpdateFromDiskBody) -> ControlReply:
    """Replace the model's weights by the checkpoint ``body.model_path``: a directory, or a hub id, which is downloaded
    first. Raises RequestError 400 if there is none."""
    if body.load_format not in (None, "auto", "safetensors"):
        raise RequestError(
            400, f"load_format {body.load_format!r} is not supported: use safetensors", param="load_format"
        )
    if not body.model_path:
        raise RequestError(400, "model_path is empty: give a directory or a hub id", param="model_path")
    download_dir = manager.config.server_args.download_dir
    try:
        directory = await asyncio.to_thread(
            model_directory, body.model_path, "model_path", None, download_dir, weights=True
        )
    except ValueError as error:
        raise RequestError(400, str(error), param="model_path") from error
    except (OSError, RuntimeError) as error:  # a path that the system refuses; "~user" of a user who does not exist
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RequestError(400, f"model_path is no directory: {reason}", param="model_path") from error
    return await manager.update_weights(
        model_path=directory,
        weight_version=body.weight_version,
        abort_all_requests=body.abort_all_requests,
        keep_pause=body.keep_pause,
    )


async def update_from_body(manager: TokenizerManager, body: UpdateFromTensorBody) -> ControlReply:
    """Some tensors, as base64 of the bytes that ``safetensors.torch.save`` makes. Raises RequestError 400 for others:
    SGLang's own clients send pickles, which can run code when they are read."""
    if body.load_format != "safetensors":
        raise RequestError(
            400,
            "pickled tensors are not read, since they can run code: send base64 of safetensors.torch.save(tensors) with"
            " load_format 'safetensors', or use /update_weights_from_disk",
            param="load_format",
        )
    tp_size = manager.config.server_args.tp_size
    entries = body.serialized_named_tensors
    if len(entries) not in (1, tp_size) or any(entry != entries[0] for entry in entries[1:]):
        raise RequestError(
            400,
            f"serialized_named_tensors must have one entry with whole tensors, or {tp_size} equal ones",
            param="serialized_named_tensors",
        )
    with _private_file(manager) as path:
        try:
            await asyncio.to_thread(_write_decoded, entries[0], path)
        except ValueError as error:
            raise RequestError(
                400, "serialized_named_tensors is not base64", param="serialized_named_tensors"
            ) from error
        return await manager.update_weights(
            file=str(path), weight_version=body.weight_version, abort_all_requests=body.abort_all_requests
        )


def _write_decoded(text: str, path: Path) -> None:
    """Decode ``text`` from base64 and write the bytes. Other threads wait while a piece is decoded, so pieces are
    small. Raises ``ValueError`` if it is not base64."""
    with path.open("wb") as file:
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            data = base64.b64decode(piece, validate=True)
            if start + _PIECE < len(text) and len(data) < _PIECE // 4 * 3:
                raise ValueError("padding before the end")
            file.write(data)


async def update_from_tensors(
    manager: TokenizerManager,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    weight_version: str | None,
    abort_all_requests: bool,
) -> ControlReply:
    """(name, tensor) pairs with the checkpoint's names and whole shapes, on any device; other weights stay as they are.
    Raises RequestError 400 for a name that comes twice."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if name in tensors:
            raise RequestError(400, f"weight {name} comes twice", param="named_tensors")
        tensors[name] = tensor.detach().cpu().contiguous().clone()  # the format stores no shared memory
    with _private_file(manager) as path:
        await asyncio.to_thread(save_file, tensors, path)
        del tensors
        return await manager.update_weights(
            file=str(path), weight_version=weight_version, abort_all_requests=abort_all_requests
        )


def answer_of(reply: ControlReply) -> dict[str, object]:
    paused = json.loads(reply.payload or b"0")
    return {
        "success": reply.success,
        "message": reply.message,
        "num_paused_requests": sum(paused) if isinstance(paused, list) else paused,
    }


@contextmanager
def _private_file(manager: TokenizerManager) -> Iterator[Path]:
    """The path of a file that only this user can read, deleted at the end."""
    if manager.config.server_args.nnodes > 1:
        raise RequestError(
            400,
            "tensors reach the ranks of one host alone: write a checkpoint that all hosts see and use"
            " /update_weights_from_disk",
        )
    with tempfile.TemporaryDirectory(prefix="fenceline-weights-") as folder:
        yield Path(folder, "tensors.safetensors")
