"""Threads for work beside the engine that may take long, or for ever.

Owns the threads. Must never know what a job does.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any


class SideThreads(Executor):
    """Jobs run in order of arrival, `count` at a time. Unlike the standard library's pool they do not keep a
    process from ending: a job that never ends is left behind."""

    def __init__(self, count: int, *, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        for index in range(count):
            threading.Thread(target=self._run, name=f"{name}_{index}", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _run(self) -> None:
        while True:
            future, job = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    result = job()
                except Exception as error:  # noqa: BLE001 - whoever waits for the future is told
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del future, job  # an idle thread keeps nothing alive
