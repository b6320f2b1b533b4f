"""What a rank knows of the end of others, without any rank."""

from __future__ import annotations

from oslo_engine.comm.last_words import _FAILED, _Watch


class Store:
    """Of a job, as long as the process that keeps it lives."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.is_gone = False

    def _reach(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.said for key in keys)

    def get(self, key: str) -> bytes:
        self._reach()
        return self.said[key].encode()


def test_a_cause_that_was_heard_is_known_after_the_store_has_gone() -> None:
    store = Store()
    watch = _Watch(store, rank=3, num_ranks=4, world=None)
    assert watch._first_failure() is None
    store.said[_FAILED] = "rank 1: ValueError: no more of this"
    assert watch._first_failure() == store.said[_FAILED]
    store.is_gone = True
    assert watch._first_failure() == "rank 1: ValueError: no more of this"


def test_a_store_that_has_gone_is_asked_no_more() -> None:
    store = Store()
    watch = _Watch(store, rank=3, num_ranks=4, world=None)
    store.is_gone = True
    assert watch._first_failure() is None
    store.is_gone, store.said[_FAILED] = False, "rank 1: too late"
    assert watch._first_failure() is None
