"""The catalog's state as an object in S3, with what to do about servers that ignore conditions.

A write is a PUT with If-Match, or If-None-Match while there is nothing, so two fleets over one prefix cannot
overwrite each other's changes. Some servers answer such a PUT as if it had no condition: that must be found
out before anything is trusted to it, and nothing but a PUT that ought to fail can tell.
"""

from __future__ import annotations

import logging

from engine.adapters.files import SourceChanged
from engine.adapters.s3 import ConditionsUnsupported, S3Object
from router.catalog_state import Kept

logger = logging.getLogger(__name__)

NO_TAG = '"00000000000000000000000000000000"'  # of no object


class BucketStore:
    def __init__(self, uri: str) -> None:
        self._object = S3Object(uri)
        self._is_guarded: bool | None = None  # None: not known before the first write

    @property
    def kept(self) -> Kept:
        return "unguarded_bucket" if self._is_guarded is False else "bucket"

    def read(self) -> tuple[bytes, str] | None:
        return self._object.read()

    def write(self, content: bytes, tag: str | None) -> str:
        is_guarded = self._is_guarded  # another thread may find it out meanwhile
        if is_guarded:
            return self._object.write(content, tag)
        # between this read and the write another fleet may write: all that can be had without conditions
        found = self.read()
        if (found[1] if found else None) != tag:
            raise SourceChanged
        if is_guarded is None:
            return self._write_first(content, tag)
        return self._object.overwrite(content)

    def _write_first(self, content: bytes, tag: str | None) -> str:
        """And find out what conditions are worth here: two more writes of the same must not pass."""
        try:
            new = self._object.write(content, tag)
            is_guarded = self._is_refused(content, NO_TAG) and self._is_refused(content, None)
        except ConditionsUnsupported:
            is_guarded = False
        self._is_guarded = is_guarded
        if is_guarded:
            return new
        logger.error(
            "this S3 server ignores If-Match and If-None-Match: two fleets that keep their catalog under one "
            "prefix can lose each other's loads and unloads. Give each its own prefix or catalog file"
        )
        return self._object.overwrite(content)

    def _is_refused(self, content: bytes, tag: str | None) -> bool:
        try:
            self._object.write(content, tag)
        except SourceChanged:
            return True
        return False
