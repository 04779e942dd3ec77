"""What a request is called in headers and in the log."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclass(slots=True)
class Labels:
    """Set up by the middleware from the headers; a body may rename the request and name a user."""

    request_id: str
    user: str | None = None


# Not kept in the request itself: aiohttp's typed keys for that are newer than what we support.
current_labels: ContextVar[Labels] = ContextVar("current_labels")


def start_labels(sent_id: str) -> Labels:
    """Labels for a new request of this task; a client's id is taken over if it is safe to log."""
    labels = Labels(sent_id if REQUEST_ID_PATTERN.fullmatch(sent_id) else uuid.uuid4().hex)
    current_labels.set(labels)
    return labels
