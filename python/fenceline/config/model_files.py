"""Finds the files of --model-path and --tokenizer-path, in a local directory or through huggingface_hub, and reads the
small JSON files among them without transformers or torch. A GGUF file counts as the directory that it was made from.

huggingface_hub caches downloads, shows the progress on a terminal, and reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from fenceline.config import ConfigError, user_path
from fenceline.config.gguf_file import is_gguf, names_of_parts, parts_of
from fenceline.config.gguf_model import DESCRIBED, described, gguf_model
from fenceline.ipc.progress import announced

# The names of demo models and their folders in the package.
DEMOS = {
    "demo": "demo_model",
    "demo-moe": "demo_moe_model",
    "demo-tools": "demo_tools_model",
    "demo-vision": "demo_vision_model",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_GGUF = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)/(?P<file>(?:[\w.-]+/)*[\w.-]+\.gguf)")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
_WEIGHT_FILES = ("*.safetensors",)
# Second copies of the weights that some repositories carry for other programs.
_IGNORED = ("original/*", "consolidated*", "onnx/*", "*.onnx*", "openvino/*", "gguf/*")


def demo_model_path(name: str = "demo") -> str:
    """The directory of a demo model inside the installed package: "demo", "demo-moe" (a mixture of experts),
    "demo-tools" (which calls a calculator) or "demo-vision" (which reads pictures). Raises ConfigError if it
    is missing."""
    path = Path(__file__).parent.parent / DEMOS[name]
    if not (path / "config.json").is_file():
        raise ConfigError("the demo model is missing from this installation: reinstall the package")
    return str(path)


def model_directory(name: str, flag: str, revision: str | None, download_dir: str | None, weights: bool) -> str:
    """The local directory or GGUF file for ``name``, the value of ``flag``; downloads it if necessary. ``weights``
    False fetches configuration and tokenizer only. Raises ConfigError, one line, if ``name`` is neither one of these
    nor a repository that can be downloaded."""
    if name in DEMOS and not Path(name).is_dir():
        return demo_model_path(name)
    path = user_path(name)
    if path.is_dir() or is_gguf(path):
        if revision is not None:
            raise ConfigError(f"{_revision(flag)} chooses a version of a hub id, {flag} {name} is local: leave it out")
        return str(_gguf_inside(path.resolve(), weights) if path.is_dir() else parts_of(path.resolve())[0])
    if path.is_file():
        raise ConfigError(f"{flag} {name}: is a file; give the directory that holds it")
    if found := _HUB_GGUF.fullmatch(name):
        folder = _download(found["repository"], flag, revision, download_dir, names_of_parts(found["file"]), [])
        if not (Path(folder) / found["file"]).is_file():
            raise ConfigError(f"{flag} {name}: no such file here, and the repository has none of this name")
        return str(parts_of(Path(folder) / found["file"])[0])
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{flag} {name}: no such directory; give a model directory, a hub id, or one of {', '.join(DEMOS)}"
        )
    patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())]
    return _download(name, flag, revision, download_dir, patterns, _IGNORED)


def _gguf_inside(directory: Path, weights: bool) -> Path:
    """The GGUF file of a directory that has one and no other weights, or, if no ``weights`` are asked for, no other
    configuration or tokenizer; otherwise the directory. Raises ConfigError if it has several models."""
    found = [path for path in sorted(directory.glob("*.gguf")) if not path.name.startswith("mmproj")]
    others = ("*.safetensors",) if weights else ("*.safetensors", "config.json", "tokenizer.json")
    if not found or _has(directory, *others):
        return directory
    models = sorted({parts_of(path)[0] for path in found})
    if len(models) > 1:
        raise ConfigError(
            f"{directory}: holds {len(models)} GGUF models; give one of them, such as {directory / models[0].name}"
        )
    return models[0]


def hub_file(name: str, flag: str, download_dir: str | None) -> str:
    """The local path of ``name``, the value of ``flag``: a file, or ORG/NAME/FILE on the hub, which is downloaded if
    necessary. Raises ConfigError, one line, if it is neither."""
    path = user_path(name)
    if path.is_file():
        return str(path.resolve())
    repository, _, file = name.rpartition("/")
    if not file or "/" not in repository or not _HUB_ID.fullmatch(repository):
        raise ConfigError(f"{flag} {name}: no such file; give a path, or ORG/NAME/FILE on the hub")
    with _downloads_of(name, flag, None):
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repository, file, cache_dir=download_dir)


def _revision(flag: str) -> str:
    """The revision flag for ``flag``: --revision for --model-path."""
    return "--revision" if flag == "--model-path" else flag.replace("path", "revision")


def _download(
    name: str,
    flag: str,
    revision: str | None,
    download_dir: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str],
) -> str:
    with _downloads_of(name, flag, revision):
        from huggingface_hub import snapshot_download

        return snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
        )


@contextmanager
def _downloads_of(name: str, flag: str, revision: str | None) -> Iterator[None]:
    """For a download of ``name``, the value of ``flag``: says that it begins, and makes a ConfigError of its errors."""
    # Imported here because it takes a second, which local directories do not need.
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    say = partial(print, file=sys.stderr, flush=True)
    progress: AbstractContextManager[None] = nullcontext()
    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log file they would be one long line with carriage returns
        say(f"Fetching {name} from the hub, unless it is in the download cache")
        progress = announced(f"fetching {name}", say)
    try:
        with progress:
            yield
    except errors.GatedRepoError as error:
        reason = "access to it is restricted; ask for access on its page and set HF_TOKEN"
        raise ConfigError(f"{flag} {name}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{flag} {name}: the repository has no {_revision(flag)} {revision}") from error
    except errors.RepositoryNotFoundError as error:
        reason = "neither a directory here nor a repository on the hub (a private one needs HF_TOKEN)"
        raise ConfigError(f"{flag} {name}: {reason}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        reason = "neither a directory here nor in the download cache, and the hub cannot be reached (offline?)"
        raise ConfigError(f"{flag} {name}: {reason}") from error
    except errors.EntryNotFoundError as error:
        raise ConfigError(f"{flag} {name}: the repository has no such file") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{flag} {name}: neither a directory here nor a hub id") from error
    except (errors.HfHubHTTPError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{flag} {name}: the download failed ({reason}); try again, it continues") from error


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LFS_POINTER = b"version https://git-lfs"
CONVERT = "convert them once with transformers: AutoModelForCausalLM.from_pretrained(dir).save_pretrained(new_dir)"
CONVERT_DRAFT = (  # transformers has no class for drafts
    'convert them once: python -c "import torch, safetensors.torch as s;'
    " s.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')\""
)


def is_file(path: Path) -> bool:
    """Whether there is a regular file at ``path``, through links. Raises ``ConfigError`` if there is something else,
    because opening a pipe waits for ever and a device has no end."""
    try:
        mode = path.stat().st_mode
    except NotADirectoryError:
        return path.name in DESCRIBED and is_gguf(path.parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: is no regular file; remove it, or download the model again")
    return True


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in ``path``. Raises ``ConfigError`` if the file is unreadable, not JSON, or not an object."""
    try:
        value: object = json.loads(path.read_bytes())
    except NotADirectoryError:
        if not is_file(path):
            raise ConfigError(f"{path}: no such file") from None
        return described(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        detail = str(error).splitlines()[0]
        raise ConfigError(f"{path}: not valid JSON ({detail}); download the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected, got {type(value).__name__}")
    return value


def read_optional(path: Path) -> dict[str, object]:
    """Like ``read_json_object``, but empty if there is no such file."""
    return read_json_object(path) if is_file(path) else {}


def read_model_json(directory: Path) -> dict[str, object]:
    """``config.json`` of a model directory. Raises ``ConfigError`` with the remedy if it is missing."""
    if not directory.is_dir() and not is_gguf(directory):
        raise ConfigError(f"{directory}: no such model directory; give --model-path a directory or a hub id")
    path = directory / "config.json"
    if not is_file(path):
        raise ConfigError(f"{directory}: {_instead_of_a_model(directory)}")
    return read_json_object(path)


def pools_last_token(directory: Path) -> bool:
    """Whether a model directory is an embedding model of sentence-transformers, whose modules.json pools, and whose
    embeddings are the states of the last tokens, or a GGUF file of such a model. (That of a reranker does not pool.)
    Raises ``ConfigError`` for a model that makes embeddings in another way."""
    if is_gguf(directory):
        return gguf_model(directory).pools_last_token
    path = directory / "modules.json"
    if not is_file(path):
        return False
    try:
        modules = [(str(one["type"]).rsplit(".", 1)[-1], str(one["path"])) for one in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path}: no list of modules with type and path; download the file again") from None
    if "Pooling" not in dict(modules):
        return False
    for kind, folder in modules:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(f"{path}: has a module {kind}, which is not served; use a model without it")
        if kind == "Pooling":
            _check_pooling(directory / folder / "config.json")
    return True


def _check_pooling(path: Path) -> None:
    config = read_json_object(path)
    named = config.get("pooling_mode")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if named not in ("lasttoken", ["lasttoken"], ("lasttoken",)) and modes != ["pooling_mode_lasttoken"]:
        raise ConfigError(
            f"{path}: pools by {named or ', '.join(modes) or 'the mean'}: only the last token's state is served, since"
            " the states of a cached prefix's tokens are not kept; use a model that pools the last token, such as"
            " Qwen3-Embedding"
        )


def _instead_of_a_model(directory: Path, convert: str = CONVERT) -> str:
    """For an error message: what a directory without config.json or without weights seems to be, and the remedy."""
    adapter = directory / "adapter_config.json"
    if is_file(adapter):
        base = read_json_object(adapter).get("base_model_name_or_path") or "its base model"
        return (
            f"holds an adapter (LoRA), not a model; merge it into {base} (peft: merge_and_unload, save_pretrained) and "
            "give the merged directory"
        )
    if _has(directory, "*.bin", "*.pt", "*.pth"):
        return "only pickled weights (.bin, .pt), which can run code when read; " + convert
    if not any(directory.iterdir()):
        return "is an empty directory; download the model into it, or give --model-path a hub id"
    if (directory / "config.json").is_file():
        return "no *.safetensors files; download the weights, or use --load-format dummy"
    return "no config.json; --model-path wants a Hugging Face model directory"


def _has(directory: Path, *patterns: str) -> bool:
    return any(next(directory.glob(pattern), None) is not None for pattern in patterns)


def weight_files(directory: Path, convert: str = CONVERT) -> list[Path]:
    """The checkpoint's safetensors files, or the parts of a GGUF file, in order. Raises ``ConfigError`` if there are
    none or one is missing; ``convert`` is the remedy if the weights are in another format."""
    if is_gguf(directory):
        return [_no_pointer(part) for part in parts_of(directory)]
    index = directory / _INDEX
    if is_file(index):
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: no weight_map; download the file again")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not is_file(directory / name)]
        if missing:
            raise ConfigError(
                f"{directory}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}; "
                f"download the model again"
            )
        return [_no_pointer(directory / name) for name in names]
    if is_file(directory / _SINGLE):
        return [_no_pointer(directory / _SINGLE)]
    # Some repositories have the weights in Mistral's own format too, in files with this name.
    candidates = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("consolidated"))
    found = [path for path in candidates if is_file(path)]
    if not found or (directory / "adapter_config.json").is_file():
        raise ConfigError(f"{directory}: {_instead_of_a_model(directory, convert)}")
    return [_no_pointer(path) for path in found]


def _no_pointer(path: Path) -> Path:
    """``path``. Raises ``ConfigError`` if it is a git-lfs pointer file, left in place of a large file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ConfigError(f"{path}: is a pointer of git-lfs, not the weights; run git lfs pull in that directory")
    return path


def token_ids(value: object) -> list[int]:
    """Token ids of an ``eos_token_id`` entry: an int, a list of ints or nothing."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]


def tokenizer_eos_id(directory: Path) -> int | None:
    """The id of the tokenizer's end-of-sequence token; None if the directory's files do not say it."""
    config = read_optional(directory / "tokenizer_config.json")
    text = token_text(config.get("eos_token"))
    if text is None:
        text = token_text(read_optional(directory / "special_tokens_map.json").get("eos_token"))
    if text is None:
        return None
    decoder = config.get("added_tokens_decoder")
    for number, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if token_text(entry) == text and str(number).isdecimal():
            return int(number)
    return _find_in_tokenizer_json(read_optional(directory / "tokenizer.json"), text)


def token_text(value: object) -> str | None:
    """A special token is written as a string or as ``{"content": string, ...}``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _find_in_tokenizer_json(tokenizer: Mapping[str, object], text: str) -> int | None:
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel
        number = vocab.get(text)
        return number if isinstance(number, int) else None
    for number, entry in enumerate(vocab if isinstance(vocab, list) else []):  # Unigram: [piece, score]
        if isinstance(entry, list) and entry[:1] == [text]:
            return number
    return None


def tokenizer_vocab(directory: Path) -> dict[str, int] | None:
    """The map from tokens to ids in ``tokenizer.json``, without added tokens; None if there is no vocabulary in it."""
    model = read_optional(directory / "tokenizer.json").get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, list):  # Unigram: [piece, score]
        vocab = {entry[0]: number for number, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    return vocab if isinstance(vocab, dict) else None
