from pathlib import Path

from wire.generate import check, drifted


def test_committed_stubs_are_what_proto_generates() -> None:
    assert check() == []


def test_changed_missing_and_extra_stubs_are_drift(tmp_path: Path) -> None:
    fresh, committed = tmp_path / "fresh", tmp_path / "committed"
    for folder in (fresh, committed):
        folder.mkdir()
        (folder / "same_pb2.py").write_text("same")
    (fresh / "changed_pb2.py").write_text("new")
    (committed / "changed_pb2.py").write_text("old")
    (fresh / "missing_pb2.pyi").write_text("")
    (committed / "extra_pb2.py").write_text("")
    assert drifted(fresh, committed) == ["changed_pb2.py", "extra_pb2.py", "missing_pb2.pyi"]
