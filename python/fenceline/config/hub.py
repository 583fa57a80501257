"""From ``--model-path`` to a directory: local ones as they are, hub ids through huggingface_hub.

huggingface_hub does the caching, shows the progress on a terminal, and reads HF_TOKEN, HF_HOME and HF_HUB_OFFLINE
itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fenceline.config.errors import ConfigError

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
_WEIGHT_FILES = ("*.safetensors",)
# Second copies of the weights that some repositories carry for other programs.
_IGNORED = ("original/*", "consolidated*", "onnx/*", "*.onnx*", "openvino/*", "gguf/*")


def demo_model_path() -> str:
    """The directory of the demo model inside the installed package. Raises ConfigError if it is not there."""
    path = Path(__file__).parent.parent / "demo_model"
    if not (path / "config.json").is_file():
        raise ConfigError("the demo model is missing from this installation: reinstall the package")
    return str(path)


def model_directory(
    name: str, flag: str, revision: str | None, download_dir: str | None, weights: bool
) -> str:
    """The local directory that ``name``, the value of ``flag``, stands for, downloaded if it has to be.

    ``weights`` False fetches configuration and tokenizer only. Raises ConfigError, one line, if ``name`` is neither
    a directory nor a repository that can be had.
    """
    if name == DEMO and not Path(name).is_dir():
        return demo_model_path()
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"--revision chooses a version of a hub id, {flag} {name} is a directory: leave it out"
            )
        return str(path.resolve())
    if path.is_file():
        if path.suffix == ".gguf":
            raise ConfigError(
                f"{flag} {name}: GGUF files are not read; give the original model in safetensors"
            )
        raise ConfigError(f"{flag} {name}: is a file; give the directory that holds it")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{flag} {name}: no such directory; give a model directory, a hub id or 'demo'")
    return _download(name, flag, revision, download_dir, weights)


def _download(name: str, flag: str, revision: str | None, download_dir: str | None, weights: bool) -> str:
    # Imported here: a second of start-up that local directories need not pay.
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # in a log file they would be one long line of carriage returns
        print(
            f"Fetching {name} from the hub, unless it is in the download cache", file=sys.stderr, flush=True
        )
    patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=list(_IGNORED),
        )
    except errors.GatedRepoError as error:
        reason = "access to it is restricted; ask for access on its page and set HF_TOKEN"
        raise ConfigError(f"{flag} {name}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{flag} {name}: the repository has no --revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        reason = "neither a directory here nor a repository on the hub (a private one needs HF_TOKEN)"
        raise ConfigError(f"{flag} {name}: {reason}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        reason = (
            "neither a directory here nor in the download cache, and the hub cannot be reached (offline?)"
        )
        raise ConfigError(f"{flag} {name}: {reason}") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{flag} {name}: neither a directory here nor a hub id") from error
    except (errors.HfHubHTTPError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{flag} {name}: the download failed ({reason}); try again, it continues"
        ) from error
