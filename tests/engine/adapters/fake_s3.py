"""As much of S3 as the reader uses, over HTTP, with faults on demand."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.engine.adapters import faults
from tests.engine.adapters.faults import Fault, Faults, FaultyHandler


@dataclass
class FakeS3(Faults):
    bucket: str = "models"
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # keys got, and prefixes listed
    page_size: int = 1000
    knows_conditions: bool = True  # else If-Match is ignored
    tells_tokens: bool = True  # of the next page of a listing

    def etag(self, key: str) -> str:
        return f'"{zlib.crc32(self.objects[key]):08x}"'

    def reset(self) -> None:
        super().reset()
        self.objects.clear()
        self.requests.clear()
        self.page_size = 1000
        self.knows_conditions = self.tells_tokens = True

    @property
    def keys_got(self) -> list[str]:
        return [request for request in self.requests if not request.startswith("list ")]


@contextmanager
def serve(fake: FakeS3) -> Iterator[str]:
    """Yields the endpoint URL."""

    class Handler(_Handler):
        faults = s3 = fake

    with faults.serve(Handler) as endpoint:
        yield endpoint


class _Handler(FaultyHandler):
    s3: FakeS3

    def get(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query)
        fault = self.s3.take(key or "list")
        if fault and fault.kind == "status":
            self.error(fault.status, fault.code)
        elif bucket != self.s3.bucket:
            self.error(404, "NoSuchBucket")
        elif key:
            self._get_object(key, fault)
        else:
            self._list(query, fault)

    def _list(self, query: dict[str, list[str]], fault: Fault | None) -> None:
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        start = int(query.get("continuation-token", ["0"])[0])
        self.s3.requests.append(f"list {prefix}")
        keys = self._keys(prefix, delimiter)
        page = keys[start : start + self.s3.page_size]
        more = start + self.s3.page_size < len(keys)
        contents = "".join(map(self._entry, page))
        token = f"<NextContinuationToken>{start + self.s3.page_size}</NextContinuationToken>"
        token = token if more and self.s3.tells_tokens else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        body = f"<ListBucketResult>{truncated}{token}{contents}</ListBucketResult>"
        self.answer(200, body.encode(), fault=fault)

    def _keys(self, prefix: str, delimiter: str) -> list[str]:
        """And folders, which end with the delimiter."""
        keys = {key for key in self.s3.objects if key.startswith(prefix)}
        if delimiter:
            parts = {key: key[len(prefix) :].partition(delimiter) for key in keys}
            keys = {f"{prefix}{name}{end}" for name, end, _ in parts.values()}
        return sorted(keys)

    def _entry(self, key: str) -> str:
        if key not in self.s3.objects:
            return f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
        return (
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.s3.objects[key])}</Size>"
            f"<ETag>{escape(self.s3.etag(key))}</ETag></Contents>"
        )

    def _get_object(self, key: str, fault: Fault | None) -> None:
        self.s3.requests.append(key)
        if fault and fault.kind == "change":
            self.s3.objects[key] = fault.content
        if key not in self.s3.objects:
            return self.error(404, "NoSuchKey")
        is_match = self.headers.get("If-Match", self.s3.etag(key)) == self.s3.etag(key)
        if self.s3.knows_conditions and not is_match:
            return self.error(412, "PreconditionFailed")
        content = self.s3.objects[key]
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        if first >= len(content):
            return self.error(416, "InvalidRange")
        if fault and fault.kind == "start":
            first, last = 0, last - first
        body = content if fault and fault.kind == "whole" else content[first : last + 1]
        headers = {
            "ETag": self.s3.etag(key),
            "Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(content)}",
        }
        return self.answer(206, body, headers, fault)
