"""The router's gRPC server: Generation, health and reflection on one port."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.grpc_service import GenerationService
from wire.gen import generate_pb2, generate_pb2_grpc
from wire.grpc_options import SERVER_OPTIONS

SERVICE = generate_pb2.DESCRIPTOR.services_by_name["Generation"].full_name


class RouterGrpcServer:
    """Listens from construction on (in a running loop), serves from `start` on; `port` is the bound one.

    Raises OSError when it cannot bind.
    """

    def __init__(
        self,
        service: GenerationService,
        address: str,
        *,
        credentials: grpc.ServerCredentials | None = None,
        reuse_port: bool = False,
    ) -> None:
        shared = dict(SERVER_OPTIONS) | {"grpc.so_reuseport": int(reuse_port)}
        self._server = grpc.aio.server(options=tuple(shared.items()))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # stubs miss it
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        generate_pb2_grpc.add_GenerationServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Serve, and say so to health checks of the process; a cluster's readiness is HTTP's /ready."""
        await self._server.start()
        await self._set_all(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Tell health checks that nothing new is welcome."""
        await self._set_all(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop listening; calls still open after `grace_s` are cancelled."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _set_all(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)
