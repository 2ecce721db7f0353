"""Options of our gRPC connections, the same on both sides where both must agree. Plain data."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

Options = tuple[tuple[str, int], ...]

_BOTH: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS: Options = (
    *_BOTH,
    # Nodes talk to nodes: a proxy meant for the internet must not get between them.
    ("grpc.enable_http_proxy", 0),
    # Else a restarted node inherits the reconnect backoff that other channels of this process built up.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS: Options = (
    *_BOTH,
    # Two nodes must not share a port by accident.
    ("grpc.so_reuseport", 0),
    # Idle streams are pinged by the other side; never answer that with a GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)
