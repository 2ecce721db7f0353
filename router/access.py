"""The router's settings for who may use it, and over what. Flags of their own, as all others.

Owns names and rules, and the credentials read from files. Must never know a request.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from router.api_keys import ApiKeys, read_entries, single_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Every instance is valid: bad values raise ValueError naming the field, and never a key."""

    api_key: str = field(default="", repr=False)
    """One API key that users may show as a bearer token; empty and without api_keys_file: none is asked."""

    api_keys_file: str = ""
    """TOML file with the digests of API keys, their names and limits (`paceline key` makes an entry)."""

    tls_cert_file: str = ""
    """Certificate (PEM) of the HTTP and gRPC servers; empty: plain text."""

    tls_key_file: str = ""
    """Private key (PEM) of tls_cert_file."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            name = "tls_key_file" if self.tls_cert_file else "tls_cert_file"
            raise ValueError(f"{name} must be set too, got ''")

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert_file else "http"

    def keys(self, *, clock: Callable[[], float]) -> ApiKeys:
        """Reads the file. Raises ValueError naming the field."""
        if self.api_keys_file:
            entries = read_entries(Path(self.api_keys_file), single_key=self.api_key)
        else:
            entries = single_entry(self.api_key)
        return ApiKeys(entries, clock=clock)

    def check_certificate(self) -> None:
        """Raises ValueError for files that are no certificate and its key."""
        if not self.tls_cert_file:
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.tls_cert_file, self.tls_key_file
            )
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"tls_cert_file and tls_key_file must be a certificate and its key, got"
                f" {self.tls_cert_file!r} and {self.tls_key_file!r}: {error}"
            ) from None

    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        if not self.tls_cert_file:
            return None
        pair = (Path(self.tls_key_file).read_bytes(), Path(self.tls_cert_file).read_bytes())
        return grpc.ssl_server_credentials([pair])
