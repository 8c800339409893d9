"""Adapters in an S3 bucket, under one key prefix. No key outside the prefix is ever requested.

Requests are retried by botocore; a body that is cut or stalls is resumed here, from the same version of the
object (IfMatch). Errors name the adapter and S3's error code, never keys, URLs or credentials.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from urllib3.exceptions import HTTPError

from engine.adapters.files import CONFIG_FILE, AdapterFile, AdapterListing, SourceChanged, make_listing
from engine.adapters.names import check_adapter_name, is_folder_name
from engine.errors import AccessDenied, InvalidRequest, ModelNotFound, Unavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, ListObjectsV2OutputTypeDef, ObjectTypeDef

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0  # between two bytes
MAX_RESUMES = 3  # of one range
MAX_LISTINGS = 3  # of one page
MAX_SOURCE_KEYS = 1_000_000  # 10,000 adapters, each with all that its training left, hold fewer
MAX_FOLDER_KEYS = 10_000  # files of one adapter or base model, and folders beside them
RESUME_DELAY_S = 0.1  # doubled each time
RETRY_AFTER_S = 5.0
_STEP_BYTES = 1 << 20
_SCHEME = "s3://"


class S3Source:
    """Each sub-folder of the prefix that holds an adapter_config.json is an adapter."""

    def __init__(self, uri: str) -> None:
        self._bucket, self._prefix = _parse(uri)

    def list_adapters(self) -> list[AdapterListing]:
        root = f"{self._prefix}/" if self._prefix else ""
        folders: dict[str, list[AdapterFile]] = {}
        # one flat listing: a request per adapter would be slower than skipping the keys below them
        with _mapped("the adapter source"):
            for entry in _list_objects(self._bucket, root, MAX_SOURCE_KEYS):
                name, _, file = entry["Key"][len(root) :].partition("/")
                if is_folder_name(name) and file and "/" not in file:
                    folders.setdefault(name, []).append(_as_file(file, entry))
        return [
            make_listing(name, self._uri(name), files)
            for name, files in sorted(folders.items())
            if any(file.name == CONFIG_FILE for file in files)
        ]

    def find(self, name: str) -> AdapterListing:
        check_adapter_name(name, param="model")
        if not is_folder_name(name):
            raise ModelNotFound(f"no adapter {name!r}")
        return S3Folder(self._uri(name)).list_files()

    def _uri(self, name: str) -> str:
        return _SCHEME + "/".join(part for part in (self._bucket, self._prefix, name) if part)


class S3Folder:
    parallel_reads = 8  # one connection gets tens of MB/s

    def __init__(self, uri: str, kind: str = "adapter") -> None:
        """`kind`: of what is there, for errors."""
        self._uri = uri.rstrip("/")
        self._bucket, self._prefix = _parse(uri)
        self._name = self._prefix.rpartition("/")[2] or self._bucket
        self._subject = f"{kind} {self._name!r}"

    def list_files(self) -> AdapterListing:
        files = self.list_all()
        if all(file.name != CONFIG_FILE for file in files):
            raise ModelNotFound(f"no {self._subject}: there is no {CONFIG_FILE}")
        return make_listing(self._name, self._uri, files)

    def list_all(self) -> list[AdapterFile]:
        """Whatever their names."""
        root = f"{self._prefix}/" if self._prefix else ""
        with _mapped(self._subject):
            entries = _list_objects(self._bucket, root, MAX_FOLDER_KEYS, delimiter="/")
            return [_as_file(entry["Key"][len(root) :], entry) for entry in entries]

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        done = num_reads = 0
        while done < len(view):
            if num_reads > MAX_RESUMES:
                raise Unavailable(
                    f"{self._subject}: {file.name} broke off {num_reads} times",
                    retry_after_s=RETRY_AFTER_S,
                )
            if num_reads:
                # full jitter: bodies break off in crowds
                time.sleep(random.uniform(0.0, RESUME_DELAY_S * 2**num_reads))
            check()
            done += self._read_body(file, offset + done, view[done:], check)
            num_reads += 1

    def _read_body(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> int:
        """How many bytes there were before the body ended or broke off."""
        with _mapped(self._subject):
            response = _client().get_object(
                Bucket=self._bucket,
                Key=f"{self._prefix}/{file.name}" if self._prefix else file.name,
                IfMatch=file.etag,
                Range=f"bytes={offset}-{offset + len(view) - 1}",
            )
        done = 0
        with closing(response["Body"]) as body, suppress(BotoCoreError, HTTPError, OSError):
            self._check_answer(response, file, offset, len(view))
            # the stubs take a file where botocore takes a buffer
            while count := body.readinto(view[done : done + _STEP_BYTES]):  # type: ignore[arg-type]
                done += count
                check()
        return done

    def _check_answer(
        self, response: GetObjectOutputTypeDef, file: AdapterFile, offset: int, length: int
    ) -> None:
        """Some servers and proxies know no conditions or no ranges."""
        if _bare(response.get("ETag", file.etag)) != _bare(file.etag):
            raise SourceChanged
        is_there = response.get("ContentRange", "bytes 0-").startswith(f"bytes {offset}-")
        if not is_there or response.get("ContentLength") != length:
            raise Unavailable(f"{self._subject}: S3 answers with other bytes than were asked for")


class ConditionsUnsupported(Exception):
    """The server says that it does not know conditional writes."""


class S3Object:
    """One small object, replaced only by who has seen its latest state. Needs the right to write that key."""

    def __init__(self, uri: str) -> None:
        self._bucket, self._key = _parse(uri)

    def read(self) -> tuple[bytes, str] | None:
        """(content, ETag); None if it is not there."""
        with _mapped("the catalog's object"):
            try:
                response = _client().get_object(Bucket=self._bucket, Key=self._key)
                with closing(response["Body"]) as body:
                    return body.read(), response["ETag"]
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                    return None
                raise
            except (HTTPError, OSError):
                raise ConnectionClosedError(endpoint_url="") from None

    def write(self, content: bytes, etag: str | None) -> str:
        """Returns the new ETag. Raises SourceChanged unless its ETag is that one, or None and absent.

        Raises ConditionsUnsupported if the server says so; one that ignores conditions cannot be told here.
        """
        return self._put(content, {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag})

    def overwrite(self, content: bytes) -> str:
        """Returns the new ETag, whatever was there."""
        return self._put(content, {})

    def _put(self, content: bytes, condition: dict[str, str]) -> str:
        with _mapped("the catalog's object"):
            try:
                response = _client().put_object(
                    Bucket=self._bucket,
                    Key=self._key,
                    Body=content,
                    ContentType="application/json",
                    **condition,  # type: ignore[arg-type]
                )
            except ClientError as error:
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                # 409: another write is under way; 404: it was there and was deleted
                if condition and status in (404, 409):
                    raise SourceChanged from None
                if condition and status == 501:
                    raise ConditionsUnsupported from None
                raise
        return response["ETag"]


def _parse(uri: str) -> tuple[str, str]:
    """(bucket, prefix without slashes at its ends)."""
    bucket, _, prefix = uri.removeprefix(_SCHEME).partition("/")
    prefix = prefix.strip("/")
    if not bucket or (prefix and any(part in ("", ".", "..") for part in prefix.split("/"))):
        raise InvalidRequest("an S3 source is s3://bucket/prefix", param="uri")
    return bucket, prefix


def _list_objects(bucket: str, prefix: str, max_keys: int, delimiter: str = "") -> Iterator[ObjectTypeDef]:
    """Raises InvalidRequest beyond `max_keys`: a bucket of other things may hold millions."""
    page = _list_page(Bucket=bucket, Prefix=prefix, Delimiter=delimiter)
    num_keys = _num_keys(page)
    yield from page.get("Contents", ())
    while page["IsTruncated"]:
        if num_keys >= max_keys:
            raise InvalidRequest(
                f"{_SCHEME}{bucket}/{prefix} holds more than {max_keys} keys and is not listed further: "
                "adapters need a prefix of their own",
                param="uri",
            )
        token = page["NextContinuationToken"]
        page = _list_page(Bucket=bucket, Prefix=prefix, Delimiter=delimiter, ContinuationToken=token)
        num_keys += _num_keys(page)
        yield from page.get("Contents", ())


def _num_keys(page: ListObjectsV2OutputTypeDef) -> int:
    """And folders; of an empty page one, so that every listing ends."""
    return max(1, len(page.get("Contents", ())) + len(page.get("CommonPrefixes", ())))


def _list_page(**request: str) -> ListObjectsV2OutputTypeDef:
    for _ in range(MAX_LISTINGS):
        page = _client().list_objects_v2(**request)  # type: ignore[arg-type]
        # botocore takes an answer that broke off before its first byte for an empty listing
        if "IsTruncated" in page and (not page["IsTruncated"] or "NextContinuationToken" in page):
            return page
    raise ConnectionClosedError(endpoint_url="")


def _as_file(name: str, entry: ObjectTypeDef) -> AdapterFile:
    return AdapterFile(name, entry["Size"], entry["ETag"])


def _bare(etag: str) -> str:
    """Without what proxies and servers add or leave out."""
    return etag.removeprefix("W/").strip('"')


def _client() -> S3Client:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return _make_client(endpoint, CONNECT_TIMEOUT_S, READ_TIMEOUT_S)


@functools.cache
def _make_client(endpoint: str | None, connect_timeout_s: float, read_timeout_s: float) -> S3Client:
    config = Config(
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": 3},
        max_pool_connections=128,
        response_checksum_validation="when_required",  # there are none of ranges
        # a custom endpoint has no host name per bucket
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    if not (botocore_logger := logging.getLogger("botocore")).level:
        botocore_logger.setLevel(logging.INFO)  # it tells signatures and headers at DEBUG
    # a session of its own: boto3's default one must not be used by two threads at once
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)


@contextmanager
def _mapped(subject: str) -> Iterator[None]:
    """botocore's errors as ours. `from None`: theirs hold URLs and would be logged with ours."""
    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        code = error.response.get("Error", {}).get("Code", str(status))
        raise _from_status(subject, status, code) from None
    except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError):
        raise AccessDenied(f"{subject}: access denied: there are no S3 credentials") from None
    except ParamValidationError:
        raise InvalidRequest("an S3 source is s3://bucket/prefix", param="uri") from None
    except BotoCoreError as error:
        raise Unavailable(
            f"{subject}: S3 does not answer ({type(error).__name__})", retry_after_s=RETRY_AFTER_S
        ) from None


def _from_status(subject: str, status: int, code: str) -> Exception:
    if status == 404:
        return ModelNotFound(f"{subject} is not there ({code})")
    if status in (412, 416):  # 416: it has become shorter
        return SourceChanged()
    if status == 429 or status >= 500:
        return Unavailable(f"{subject}: S3 answers {code}", retry_after_s=RETRY_AFTER_S)
    # 403; 301 and 400 for a wrong region or an expired token: retrying does not help
    return AccessDenied(f"{subject}: access denied by S3 ({code})")
