"""How the processes of a cluster know each other: a shared token, mutual TLS, or both.

Owns the settings, the credentials read from them, and the check of every incoming call. Must never know
what the calls are for. Users' API keys are another matter (router.api_keys).
"""

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]

_HEADER = "authorization"
_MIN_TOKEN_CHARS = 16
# Probes of orchestrators show no token, and health says nothing worth hiding.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_REFUSAL = "the authorization metadata must carry this cluster's token"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSecurity:
    """Equal on every node and router of a cluster. Nothing set: plain text, and everybody is let in.

    Every instance is valid: bad values raise ValueError naming the field, and never the secret.
    """

    cluster_token: str = field(default="", repr=False)
    """Secret that nodes and routers show each other; better in the environment or cluster_token_file."""

    cluster_token_file: str = ""
    """File with the cluster's token."""

    cluster_cert_file: str = ""
    """Certificate (PEM) this process shows the others; with it all of the cluster's traffic is mutual TLS."""

    cluster_key_file: str = ""
    """Private key (PEM) of cluster_cert_file."""

    cluster_ca_file: str = ""
    """Certificates (PEM) of the authorities whose certificates the others must show."""

    cluster_tls_name: str = ""
    """Name all certificates of the cluster carry; empty: each carries the host it is reached at."""

    def __post_init__(self) -> None:
        if self.cluster_token and self.cluster_token_file:
            raise ValueError("cluster_token_file must be empty when cluster_token is set")
        files = {
            "cluster_cert_file": self.cluster_cert_file,
            "cluster_key_file": self.cluster_key_file,
            "cluster_ca_file": self.cluster_ca_file,
        }
        if any(files.values()):
            for name, value in files.items():
                if not value:
                    raise ValueError(f"{name} must be set too, got ''")
        elif self.cluster_tls_name:
            raise ValueError(
                f"cluster_tls_name must be empty without certificates, got {self.cluster_tls_name!r}"
            )

    @property
    def has_tls(self) -> bool:
        return bool(self.cluster_cert_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pems:
    key: bytes = field(repr=False)
    cert: bytes
    authorities: bytes


class Trust:
    """What `ClusterSecurity` says, with its files read: makes connections and guards servers."""

    def __init__(self, security: ClusterSecurity | None = None) -> None:
        """Raises ValueError naming the field whose file cannot be read or holds no token."""
        security = security or ClusterSecurity()
        token = _token(security)
        self.metadata: Metadata = ((_HEADER, f"Bearer {token}"),) if token else ()
        self._pems = _pems(security) if security.has_tls else None
        self._name = security.cluster_tls_name
        self._guard = TokenGuard(f"Bearer {token}") if token else None

    def channel(self, address: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """A connection to another process. Calls on it must carry `metadata`."""
        if self._pems is None:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            self._pems.authorities, private_key=self._pems.key, certificate_chain=self._pems.cert
        )
        named = (("grpc.ssl_target_name_override", self._name),) if self._name else ()
        return grpc.aio.secure_channel(address, credentials, options=(*options, *named))

    def server(self, options: Sequence[tuple[str, int]]) -> grpc.aio.Server:
        """A server that lets in whom we trust. Its ports must come from `listen`."""
        return grpc.aio.server(options=options, interceptors=(self._guard,) if self._guard else ())

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """The bound port. Raises OSError when it cannot bind."""
        try:
            if self._pems is None:
                return server.add_insecure_port(address)
            credentials = grpc.ssl_server_credentials(
                [(self._pems.key, self._pems.cert)],
                root_certificates=self._pems.authorities,
                require_client_auth=True,
            )
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None

    @property
    def num_refused(self) -> int:
        """Calls turned away for want of the token."""
        return self._guard.num_refused if self._guard else 0


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Ends calls without the token before any handler sees them."""

    def __init__(self, expected: str) -> None:
        self._expected = expected.encode()
        self.num_refused = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(_HEADER, "")
        is_open = handler_call_details.method.startswith(_OPEN_TO_ALL)
        if handler is None or is_open or hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        self.num_refused += 1
        if self.num_refused == 1:
            logger.warning("refused a call to %s: no or another token", handler_call_details.method)
        return _refusal(handler)


def _refusal(handler: Any) -> Any:
    """A handler of the same kind that refuses."""

    async def refuse(_request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _token(security: ClusterSecurity) -> str:
    token, name = security.cluster_token, "cluster_token"
    if security.cluster_token_file:
        name = "cluster_token_file"
        token = _read(name, security.cluster_token_file).decode().strip()
    elif not token:
        return ""
    if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise ValueError(f"{name} must hold at least {_MIN_TOKEN_CHARS} printable ASCII characters")
    return token


def _pems(security: ClusterSecurity) -> _Pems:
    return _Pems(
        key=_read("cluster_key_file", security.cluster_key_file),
        cert=_read("cluster_cert_file", security.cluster_cert_file),
        authorities=_read("cluster_ca_file", security.cluster_ca_file),
    )


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} must be a readable file, got {path!r}: {error.strerror}") from None
