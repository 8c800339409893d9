"""What the HTTP layer is told at start-up. Checked once; never mutated."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ApiSettings:
    model_names: tuple[str, ...]  # of the base model; the first one is the adapters' parent
    max_model_len: int  # tokens, prompt + output
    created: int  # epoch seconds, as listed by /v1/models
    ingress_id: str = "ingress"  # tells its series from those of other ingress replicas
    root: str = ""  # where the base model comes from, as shown to clients; "": its first name
    api_key_digests: tuple[str, ...] = ()  # see auth.digest_key; none: open to all
    allow_runtime_loading: bool = False
    allowed_uri_prefixes: tuple[str, ...] = ()  # directories or s3://bucket/prefix; none: nothing
    max_body_bytes: int = 4 * MIB

    def __post_init__(self) -> None:
        if not self.model_names:
            raise ValueError("model_names must hold at least one name")
        for name in ("max_model_len", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
