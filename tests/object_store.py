"""A small S3 server over HTTP, for the real S3 client of pyarrow: one bucket, in memory.

It speaks what that client says to read, write, look up and list objects, multipart uploads included. An upload that was
never completed is not an object. Callers without the access key are refused.
"""

import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET, ACCESS_KEY, SECRET_KEY = "bucket", "reader-and-writer", "not-a-secret"


@dataclass
class ObjectStore:
    """What the bucket holds, and the writes that were seen."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    read_only: bool = False
    refused_part: int | None = None

    def uri(self, key: str) -> str:
        """The URI of ``key`` for pyarrow.fs."""
        return f"s3://{BUCKET}/{key}?endpoint_override={self.url}&scheme=http&region=eu-central-1"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """The server inside the block."""
    store = ObjectStore()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    store.url = f"127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._get(send_content=False)

    def do_GET(self) -> None:
        self._get(send_content=True)

    def do_PUT(self) -> None:
        key, query = self._start()
        content = self._content()
        if self._refused(writing=True, part=int(query.get("partNumber", 0))):
            return
        if "uploadId" in query:
            self.store.uploads[query["uploadId"]][int(query["partNumber"])] = content
        else:
            self.store.objects[key] = content
        self._reply(200, headers={"ETag": _etag(content)})

    def do_POST(self) -> None:
        key, query = self._start()
        self._content()
        if self._refused(writing=True):
            return
        if "uploads" in query:
            upload = f"upload-{len(self.store.uploads)}"
            self.store.uploads[upload] = {}
            self._reply(200, _xml("InitiateMultipartUploadResult", Bucket=BUCKET, Key=key, UploadId=upload))
        else:
            parts = self.store.uploads.pop(query["uploadId"])
            self.store.objects[key] = b"".join(parts[number] for number in sorted(parts))
            self._reply(200, _xml("CompleteMultipartUploadResult", Bucket=BUCKET, Key=key, ETag="etag"))

    def do_DELETE(self) -> None:
        key, _ = self._start()
        if not self._refused(writing=True):
            self.store.objects.pop(key, None)
            self._reply(204)

    def _get(self, *, send_content: bool) -> None:
        key, query = self._start()
        if self._refused(writing=False):
            return
        if "list-type" in query:
            keys = [k for k in sorted(self.store.objects) if k.startswith(query.get("prefix", ""))]
            items = "".join(
                f"<Contents><Key>{k}</Key><Size>{len(self.store.objects[k])}</Size></Contents>" for k in keys
            )
            self._reply(200, _xml("ListBucketResult", Name=BUCKET, KeyCount=len(keys), IsTruncated="false", _=items))
        elif key and key not in self.store.objects:
            self._reply(404, _xml("Error", Code="NoSuchKey", Message="no such key") if send_content else b"")
        else:
            self._send_object(self.store.objects.get(key, b""), send_content=send_content)

    def _send_object(self, content: bytes, *, send_content: bool) -> None:
        headers = {"ETag": _etag(content), "Last-Modified": "Sat, 21 Nov 2026 12:00:00 GMT"}
        status, span = 200, self.headers.get("Range")
        if span is not None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            status, total = 206, len(content)
            content = content[int(first) : int(last) + 1 if last else total]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{total}"
        self._reply(status, content, headers, send_content=send_content)

    def _start(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        self.store.requests.append(f"{self.command} {self.path}")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).lstrip("/").removeprefix(BUCKET).lstrip("/"), query

    def _content(self) -> bytes:
        """The body: HTTP's chunks, and in them those of the client, which sends a checksum behind them."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            body = self.rfile.read(int(self.headers["Content-Length"]))
        else:
            body = _joined_chunks(self.rfile)
            self.rfile.readline()
        encoded = "aws-chunked" in self.headers.get("Content-Encoding", "")
        return _joined_chunks(io.BytesIO(body)) if encoded else body

    def _refused(self, *, writing: bool, part: int = 0) -> bool:
        forbidden = writing and (self.store.read_only or part == self.store.refused_part)
        if ACCESS_KEY in self.headers.get("Authorization", "") and not forbidden:
            return False
        self._reply(403, _xml("Error", Code="AccessDenied", Message="access denied"))
        return True

    def _reply(
        self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, *, send_content: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if send_content and self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


def _joined_chunks(stream: IO[bytes]) -> bytes:
    content = b""
    while size := int(stream.readline().partition(b";")[0], 16):
        content += stream.read(size)
        stream.readline()
    return content


def _xml(name: str, **values: object) -> bytes:
    inner = "".join(str(value) if key == "_" else f"<{key}>{value}</{key}>" for key, value in values.items())
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'.encode()


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
