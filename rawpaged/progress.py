"""Progress bars for a library: they start no thread and no process."""

from __future__ import annotations

import threading

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[misc]
    """tqdm without its monitor thread, and with a lock for this process only.

    tqdm's own lock serves other processes too, for which some Python versions start a helper.
    """

    monitor_interval = 0


ProgressBar.set_lock(threading.RLock())
