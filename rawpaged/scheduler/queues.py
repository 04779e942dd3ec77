"""Requests that wait or run, in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from rawpaged.request import Request, RequestGroup


def _order(group: RequestGroup) -> tuple[int, int]:
    return group.order


def _sample_index(request: Request) -> int:
    return request.sample_index


class GroupQueue:
    """Requests by group: groups by priority and arrival, the requests of one by sample index.

    A group may have requests in more than one queue. `len` counts requests.
    """

    def __init__(self) -> None:
        self._groups: list[RequestGroup] = []
        self._members: dict[RequestGroup, list[Request]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    @property
    def groups(self) -> Sequence[RequestGroup]:
        """The queue itself, which changes as requests come and go."""
        return self._groups

    def requests(self) -> list[Request]:
        """All of them, in order."""
        return [request for group in self._groups for request in self._members[group]]

    def members(self, group: RequestGroup) -> tuple[Request, ...]:
        """Requests of the group that are in this queue now."""
        return tuple(self._members.get(group, ()))

    def add(self, request: Request) -> None:
        group = request.group
        if group not in self._members:
            self._members[group] = []
            insort(self._groups, group, key=_order)
        insort(self._members[group], request, key=_sample_index)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        group = request.group
        members = self._members[group]
        members.remove(request)
        self._num_requests -= 1
        if not members:
            del self._members[group]
            del self._groups[bisect_left(self._groups, group.order, key=_order)]
