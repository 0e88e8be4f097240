"""The queue of texts that wait for their turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out for each client; between clients, one of each in turn."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[int, deque[T]] = OrderedDict()  # the next one first; none is empty

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def append(self, client: int, item: T) -> None:
        self._by_client.setdefault(client, deque()).append(item)

    def popleft(self) -> T:
        client, items = next(iter(self._by_client.items()))
        item = items.popleft()
        self._by_client.move_to_end(client)
        self._drop_if_empty(client)
        return item

    def remove(self, client: int, item: T) -> None:
        self._by_client[client].remove(item)
        self._drop_if_empty(client)

    def _drop_if_empty(self, client: int) -> None:
        if not self._by_client[client]:
            del self._by_client[client]
