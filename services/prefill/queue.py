"""The order in which requests get the engine: round-robin over owners, first come first served within one."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Not thread-safe. An owner's turn comes once a round, however many requests it has waiting."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(items) for items in self._by_owner.values())

    def push(self, owner: str, item: T) -> None:
        self._by_owner.setdefault(owner, deque()).append(item)

    def pop(self) -> T:
        """The next item. Raises IndexError when empty."""
        if not self._by_owner:
            raise IndexError("pop from an empty FairQueue")
        owner, items = self._by_owner.popitem(last=False)
        item = items.popleft()
        if items:
            self._by_owner[owner] = items
        return item

    def remove(self, owner: str, item: T) -> bool:
        """Take a waiting item out; False if it does not wait."""
        items = self._by_owner.get(owner)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._by_owner[owner]
        return True
