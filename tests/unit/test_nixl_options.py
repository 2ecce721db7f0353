from pathlib import Path

import pytest

from kv_transfer.transports.nixl_agent import default_ucx_options


@pytest.mark.parametrize(
    ("environment", "devices", "config"),
    [
        ({}, (), "TLS=^cma,MAX_RMA_RAILS=1"),
        ({}, ("mlx5_0",), "TLS=^cma"),
        ({"UCX_TLS": "tcp"}, (), "MAX_RMA_RAILS=1"),
        ({"UCX_MAX_RMA_RAILS": "2"}, (), "TLS=^cma"),
        ({"UCX_TLS": "rc"}, ("mlx5_0",), None),
    ],
)
def test_ucx_is_told_what_neither_the_operator_nor_the_hardware_decides(
    tmp_path: Path, environment: dict[str, str], devices: tuple[str, ...], config: str | None
) -> None:
    for name in devices:
        (tmp_path / name).mkdir()
    expected = {} if config is None else {"engine_config": config}
    assert default_ucx_options(environment, rdma_devices=tmp_path) == expected


def test_a_host_without_a_folder_of_rdma_devices_has_none(tmp_path: Path) -> None:
    assert default_ucx_options({}, rdma_devices=tmp_path / "none") == {
        "engine_config": "TLS=^cma,MAX_RMA_RAILS=1"
    }
