"""A small Hub in memory, on a free port of this machine, that speaks the routes huggingface_hub uses for models.

Code under test talks to it in a process of its own (``run_with_hub``), where ``HF_ENDPOINT`` points to it: nothing in
huggingface_hub is replaced. Uploads of large files take the LFS routes; Xet is switched off.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

USER, TOKEN = "tester", "hf_for_tests_only"
LFS_SUFFIXES = {".bin", ".gz", ".npz", ".png", ".safetensors"}
LFS_SIZE = 10_000_000
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


class HubError(Exception):
    """An answer with an error status; ``code`` goes into ``X-Error-Code``, where huggingface_hub looks for it."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: str) -> None:
        super().__init__(message)
        self.status, self.body = status, {"error": message, **body}
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}


@dataclass
class StoredFile:
    """Content of one file at one commit."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass
class Repository:
    """A model repository: its commits, oldest first, and what its branches point to."""

    private: bool = False
    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, StoredFile]) -> str:
        listing = "".join(f"{path} {file.oid}\n" for path, file in sorted(files.items()))
        oid = hashlib.sha1(f"{len(self.commits)} {branch}\n{listing}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid

    def resolve(self, revision: str) -> str:
        oid = self.branches.get(revision, revision)
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid


class HubServer(ThreadingHTTPServer):
    """The server and its store; ``requests`` keeps method and path of all that it was asked.

    Attributes:
        endpoint: For ``HF_ENDPOINT``.
        tokens: The tokens that may write, and whose they are.
        repositories: By ``namespace/name``.
        uploads: Large files by their SHA-256.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.tokens: dict[str, str] = {TOKEN: USER}
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def create(self, repo_id: str, *, private: bool = False) -> Repository:
        repository = self.repositories[repo_id] = Repository(private)
        repository.commit("main", {".gitattributes": StoredFile(b"*.safetensors filter=lfs\n", lfs=False)})
        return repository


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """A server that answers for as long as the block runs."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    """A Hub of its own for one test; ``tests/conftest.py`` offers it everywhere."""
    with running_hub() as server:
        yield server


def run_with_hub(
    server: HubServer, script: str, *args: str, token: str | None = TOKEN, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs Python source in a fresh process whose Hub is ``server``, with an empty cache of its own.

    Args:
        server: From ``running_hub``, or the fixture ``hub_server``.
        script: Source, with ``args`` in ``sys.argv[1:]``; it can import what the tests can.
        args: Arguments of the script.
        token: The user's token; None is a user who isn't logged in.
        timeout: Seconds after which the process is ended.
    """
    foreign = ("HF_", "HUGGING", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "TRANSFORMERS_", "DIFFUSERS_")
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(foreign)}
    with tempfile.TemporaryDirectory() as home:
        ours = {
            "HF_ENDPOINT": server.endpoint,
            "HF_HOME": home,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **({"HF_TOKEN": token} if token else {}),
        }
        return subprocess.run(
            [sys.executable, "-c", script, *args],
            env={**inherited, **ours},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


class HubHandler(BaseHTTPRequestHandler):
    """The routes. Each method answers one and returns what is sent as JSON, or has sent its own answer."""

    server: HubServer
    protocol_version = "HTTP/1.1"
    routes = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", "tree"),
        ("GET", rf"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?", "model_info"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_upload"),
        ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/verify", "lfs_verify"),
        ("HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path))
        try:
            for method, pattern, name in self.routes:
                match = re.fullmatch(pattern, path) if method == self.command else None
                if match:
                    found = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                    with self.server.lock:
                        answer = getattr(self, name)(**found)
                    if answer is not None:
                        self.send(200, json.dumps(answer).encode())
                    return
            raise HubError(404, f"no route for {self.command} {path}")
        except HubError as error:
            self.send(error.status, json.dumps(error.body).encode(), error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def user(self) -> str | None:
        """Who asks; a token that nobody has is refused on every route, as the Hub does."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer":
            return None
        if token not in self.server.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.server.tokens[token]

    def writer(self, repo_id: str | None = None) -> str:
        user = self.user()
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if repo_id is not None and repo_id.partition("/")[0] != user:
            raise HubError(403, f"You don't have the rights to write to {repo_id}")
        return user

    def repository(self, repo_id: str) -> Repository:
        user, found = self.user(), self.server.repositories.get(repo_id)
        if found is None or (found.private and user != repo_id.partition("/")[0]):
            raise HubError(404 if user else 401, "Repository not found", "RepoNotFound")
        return found

    def whoami(self) -> dict[str, Any]:
        return {"type": "user", "name": self.writer(), "orgs": [], "auth": {"type": "access_token"}}

    def create_repo(self) -> dict[str, Any]:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or self.writer()}/{asked['name']}"
        self.writer(repo_id)
        url = f"{self.server.endpoint}/{repo_id}"
        if repo_id in self.server.repositories:
            raise HubError(409, "You already created this model repo", url=url)
        self.server.create(repo_id, private=asked.get("visibility") == "private")
        return {"url": url, "name": repo_id}

    def validate_yaml(self) -> dict[str, Any] | None:
        match = re.match(r"---\n(.*?)\n---", json.loads(self.body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else {}
            errors = [] if isinstance(metadata, dict) else [{"message": "the metadata must be a mapping"}]
        except yaml.YAMLError as error:
            errors = [{"message": str(error)}]
        warnings = [] if match else [{"message": "empty or missing yaml metadata in repo card"}]
        self.send(400 if errors else 200, json.dumps({"errors": errors, "warnings": warnings}).encode())

    def preupload(self, repo: str, revision: str) -> dict[str, Any]:
        self.writer(repo)
        repository = self.repository(repo)
        present = repository.commits[repository.resolve(revision)]
        files = []
        for asked in json.loads(self.body)["files"]:
            large = PurePosixPath(asked["path"]).suffix in LFS_SUFFIXES or asked["size"] > LFS_SIZE
            entry = {"path": asked["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if asked["path"] in present:
                entry["oid"] = present[asked["path"]].oid
            files.append(entry)
        return {"files": files}

    def commit(self, repo: str, revision: str) -> dict[str, Any]:
        self.writer(repo)
        repository = self.repository(repo)
        if revision not in repository.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = dict(repository.commits[repository.branches[revision]])
        for line in self.body.splitlines():
            operation = json.loads(line)
            self.apply(operation["key"], operation["value"], files)
        oid = repository.commit(revision, files)
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}"}

    def apply(self, key: str, value: dict[str, Any], files: dict[str, StoredFile]) -> None:
        if key == "file":
            files[value["path"]] = StoredFile(base64.b64decode(value["content"]), lfs=False)
        elif key == "lfsFile":
            if value["oid"] not in self.server.uploads:
                raise HubError(400, f"LFS pointer {value['oid']} points to a file that was not uploaded")
            files[value["path"]] = StoredFile(self.server.uploads[value["oid"]], lfs=True)
        elif key == "deletedFile":
            if files.pop(value["path"], None) is None:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
        elif key != "header":
            raise HubError(400, f"this server knows no operation {key!r}")

    def tree(self, repo: str, revision: str, path: str = "") -> list[dict[str, Any]]:
        repository = self.repository(repo)
        files = repository.commits[repository.resolve(revision)]
        entries = []
        for name, file in sorted(files.items()):
            if path in ("", name) or name.startswith(f"{path}/"):
                entry = {"type": "file", "path": name, "size": len(file.content), "oid": file.git_oid}
                if file.lfs:
                    entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 134}
                entries.append(entry)
        return entries

    def model_info(self, repo: str, revision: str = "main") -> dict[str, Any]:
        repository = self.repository(repo)
        oid = repository.resolve(revision)
        files = repository.commits[oid]
        info = {"id": repo, "modelId": repo, "sha": oid, "private": repository.private, "tags": []}
        if "README.md" in files:
            block = re.match(r"---\n(.*?)\n---", files["README.md"].content.decode(), re.DOTALL)
            info["cardData"] = yaml.safe_load(block[1]) if block else {}
            info |= {key: info["cardData"][key] for key in ("library_name", "tags") if key in info["cardData"]}
        return {**info, "siblings": [{"rfilename": name} for name in sorted(files)]}

    def lfs_batch(self, repo: str) -> dict[str, Any]:
        self.writer(repo)
        self.repository(repo)
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.uploads:
                address = f"{self.server.endpoint}/lfs/{asked['oid']}"
                answer["actions"] = {"upload": {"href": address}, "verify": {"href": f"{address}/verify"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "the content does not have the announced SHA-256")
        self.server.uploads[oid] = self.body
        self.send(200, b"")

    def lfs_verify(self, oid: str) -> dict[str, Any]:
        self.writer()
        asked = json.loads(self.body)
        if asked["oid"] != oid or len(self.server.uploads.get(oid, b"")) != asked["size"]:
            raise HubError(400, "the upload is not complete")
        return {"message": "Upload verified"}

    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.repository(repo)
        commit = repository.resolve(revision)
        file = repository.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if file is None:
            answer = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", **headers}
            self.send(404, b"Entry not found", answer)
            return
        headers |= {"ETag": f'"{file.git_oid}"', "Content-Type": "application/octet-stream"}
        if file.lfs:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
        self.send(200, file.content, headers)
