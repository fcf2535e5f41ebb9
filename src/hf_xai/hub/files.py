"""Files of a config or artefact: read from a folder or the Hub, written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub

from hf_xai.errors import ConfigError, HubError


def fetch_file(
    folder_or_repo: str | Path,
    filename: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """Path of ``filename`` in a local folder, or of its cached download from a model repository.

    Raises:
        ConfigError: If there is no such folder, repository, revision or file, or the token gives no access.
        HubError: If the Hub can't be reached, or is in trouble, and the cache has no copy.
    """
    folder = Path(folder_or_repo)
    if folder.is_dir():
        if not (folder / filename).is_file():
            raise ConfigError(f"There is no {filename} in the folder {str(folder)!r}.")
        return folder / filename
    if folder.exists():
        raise ConfigError(f"{str(folder)!r} is a file; give the folder that holds {filename}, or a Hub repository.")
    at = f" at revision {revision!r}" if revision else ""
    with hub_errors(f"Can't load {filename} from {str(folder_or_repo)!r}{at} (no folder of that name here)"):
        return Path(
            huggingface_hub.hf_hub_download(
                str(folder_or_repo),
                filename,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
            )
        )


@contextmanager
def hub_errors(failure: str) -> Iterator[None]:
    """Turns what huggingface_hub raises inside the block into one sentence of ours that starts with ``failure``.

    Where the sentence says all, the library's own stack is left out (``from None``).
    """
    try:
        yield
    except hub.GatedRepoError:
        raise ConfigError(f"{failure}: access to this repository must be requested on its page.") from None
    except hub.RepositoryNotFoundError:
        raise ConfigError(f"{failure}: no such repository, or a private one and no token for it.") from None
    except hub.RevisionNotFoundError:
        raise ConfigError(f"{failure}: the repository has no such revision.") from None
    except hub.RemoteEntryNotFoundError:
        raise ConfigError(f"{failure}: the repository has no such file.") from None
    except hub.HFValidationError as error:
        raise ConfigError(f"{failure}: not a valid repository id. {error}") from None
    except hub.LocalTokenNotFoundError:
        raise ConfigError(f"{failure}: no token; log in with `hf auth login`, or pass token=.") from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        reason = "the Hub can't be reached, or may not be asked, and the cache has no copy"
        raise HubError(f"{failure}: {reason}.") from error
    except hub.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ConfigError(f"{failure}: no token, or one that the Hub refuses. {_answer(error)}") from None
        raise HubError(f"{failure}: the Hub answered with an error. {_answer(error)}") from error
    except hub.HTTPError as error:  # of the HTTP library: connection refused, time-out, proxy
        raise HubError(f"{failure}: the Hub can't be reached at {huggingface_hub.constants.ENDPOINT}.") from error


def full_repo_id(api: huggingface_hub.HfApi, repo_id: str) -> str:
    """``repo_id`` with its namespace, the user's own where it has none: a card tells others what to load."""
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"


def write_text(path: Path, text: str) -> None:
    """Writes ``path`` under a temporary name and renames it, so that a crash never leaves half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _answer(error: hub.HfHubHTTPError) -> str:
    return (error.server_message or str(error)).strip().splitlines()[-1]
