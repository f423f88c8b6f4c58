"""Memory of the budgets of all keys, as the supervisor owns it. It grows when keys come."""

import mmap
import os
from collections.abc import Sequence

from whimbrel.errors import SetupError
from whimbrel.server.budgets import Budgets, give_places
from whimbrel.server.keys import ApiKey
from whimbrel.server.processes.shared_memory import allocate


class SharedBudgets:
    def __init__(self, keys: Sequence[ApiKey], num_workers: int) -> None:
        """Raises SetupError if there is no memory."""
        self._num_workers = num_workers
        self.places = give_places(keys, {})
        """Number of the record of each key, also of those that went."""
        try:
            self.fd, memory = allocate(Budgets.memory_size(self.places, num_workers))
        except (OSError, ValueError) as error:
            raise _no_memory(keys, error) from None
        self._budgets = Budgets(keys, memory, num_columns=num_workers)

    def renew(self, keys: Sequence[ApiKey]) -> None:
        """Make room for the budgets of other keys. Those that were there keep their records. Raises SetupError."""
        places = give_places(keys, self.places)
        size = Budgets.memory_size(places, self._num_workers)
        try:
            if size > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, size)
            memory = mmap.mmap(self.fd, 0)
        except (OSError, ValueError) as error:
            raise _no_memory(keys, error) from None
        self.places = places
        self._budgets.renew(keys, places, memory)

    def clear_column(self, worker: int) -> None:
        """Forget the requests in flight of a worker that has died."""
        self._budgets.clear_column(worker)

    def close(self) -> None:
        os.close(self.fd)


def _no_memory(keys: Sequence[ApiKey], error: Exception) -> SetupError:
    return SetupError(f"there is no memory for the budgets of {len(keys):,} keys: {error}.")
