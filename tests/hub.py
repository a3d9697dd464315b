"""A stand-in for the Hugging Face Hub: a server on this machine that answers the requests that huggingface_hub sends.

Statuses, headers and bodies are the hub's. Large files travel as LFS objects, and not through Xet.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

# Tokens, their users, and what the users may write to. A fine-grained token reads and writes what it names.
USERS = {"hf_ada": "ada", "hf_reader": "ada"}
SPACES = {"hf_ada": {"ada", "lab"}, "hf_reader": set()}
COMMIT = "c0ffee" + 34 * "0"


@dataclass
class Repository:
    """private: only those who can write to it see it. gated: its files are for those who accepted its licence."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    @property
    def tags(self):
        front = self.files.get("README.md", b"").decode().split("---\n")
        return (yaml.safe_load(front[1]) or {}).get("tags", []) if len(front) > 2 else []


class Hub(ThreadingHTTPServer):
    """Runs within a `with`. repositories: by name. fails: the status of every request whose path has this in it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.fails: dict[str, int] = {}

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_):
        pass

    def reply(self, status, content=None, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        self.reply(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    @property
    def token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def may_write(self, name):
        return name.partition("/")[0] in SPACES.get(self.token, ())

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        for part, status in self.server.fails.items():
            if part in path:
                return self.reply(status, {"error": f"the stand-in fails with {status}"})
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                return self.whoami()
            case ["api", "repos", "create"]:
                return self.create(json.loads(self.body))
            case ["api", "validate-yaml"]:
                return self.reply(200, {"errors": [], "warnings": []})
            case ["objects", oid]:
                self.server.objects[oid] = self.body
                return self.reply(200)
            case ["api", "models", user, name, *rest]:
                return self.on_repository(f"{user}/{name}", "/".join(rest))
            case [user, name, "resolve", _, *file]:
                return self.file(f"{user}/{name}", "/".join(file))
            case [_, _, "info", "lfs", "objects", "batch"]:
                return self.batch(json.loads(self.body))
        return self.refuse(404, "RepoNotFound", "Repository not found")

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def whoami(self):
        if self.token not in USERS:
            return self.reply(401, {"error": "Invalid username or password."})
        return self.reply(200, {"type": "user", "name": USERS[self.token], "orgs": []})

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if not self.may_write(name):
            return self.reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        found = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repositories:
            return self.reply(409, {"error": "You already created this model repo", **found})
        private = asked.get("visibility") == "private"
        self.server.repositories[name] = Repository({".gitattributes": b"*.safetensors filter=lfs\n"}, private)
        return self.reply(200, found)

    def visible(self, name, files=False):
        """The repository, or None once it has been refused. files: whether its files are asked for."""
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self.may_write(name)):
            self.refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
        elif files and found.gated and not self.may_write(name):
            self.refuse(403 if self.token else 401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return found
        return None

    def on_repository(self, name, rest):
        if (found := self.visible(name)) is None:
            return None
        if (self.command == "POST" or rest == "auth-check/write") and not self.may_write(name):
            return self.reply(403, {"error": "Forbidden: you must have write access to content of this repo."})
        match rest.split("/")[0]:
            case "" | "revision":
                files = [{"rfilename": file} for file in found.files]
                state = {"private": found.private, "tags": found.tags, "siblings": files}
                return self.reply(200, {"id": name, "sha": COMMIT, **state})
            case "auth-check":
                return self.reply(200)
            case "tree":
                files = [{"type": "file", "path": path, "size": 0, "oid": "0"} for path in found.files]
                return self.reply(200, files)
            case "preupload":
                asked = [file["path"] for file in json.loads(self.body)["files"]]
                mode = {True: "lfs", False: "regular"}
                files = [(path, mode[path.endswith((".safetensors", ".gguf", ".png"))]) for path in asked]
                return self.reply(
                    200, {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in files]}
                )
            case "commit":
                return self.commit(name, found)
        return self.refuse(404, "EntryNotFound", "Not found")

    def batch(self, asked):
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.url}/objects/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        return self.reply(200, {"transfer": "basic", "objects": objects})

    def commit(self, name, found):
        for line in map(json.loads, self.body.splitlines()):
            match line["key"], line["value"]:
                case "file", file:
                    found.files[file["path"]] = base64.b64decode(file["content"])
                case "lfsFile", file:
                    found.files[file["path"]] = self.server.objects[file["oid"]]
                case "deletedFile", file:
                    del found.files[file["path"]]
        return self.reply(200, {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def file(self, name, path):
        if (found := self.visible(name, files=True)) is None:
            return None
        if path not in found.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        content = found.files[path]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self.reply(200, content, ETag=etag, X_Repo_Commit=COMMIT)
