"""What a router tells the garbage collector while it serves, and takes back."""

import gc

import pytest

from router.heap import settled_heap


def test_the_collector_passes_over_what_was_there_while_serving_and_is_as_before_after_it() -> None:
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    kept = [[index] for index in range(1000)]
    with settled_heap():
        assert gc.get_freeze_count() >= num_frozen + len(kept)
        assert gc.get_threshold()[0] > thresholds[0]
        assert not any(one is kept[0] for one in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_the_collector_is_as_before_when_serving_fails() -> None:
    thresholds = gc.get_threshold()
    with pytest.raises(OSError, match="port"), settled_heap():
        raise OSError("the port is taken")
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
