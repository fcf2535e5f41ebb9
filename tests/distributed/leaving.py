"""How a script that torchrun started ends."""

import os
import sys
from typing import NoReturn

from torch.distributed import barrier


def leave() -> NoReturn:
    """Ends the process once all have come here, without taking the process group apart.

    In about one of twelve runs torch 2.13 never ends: where the last reference to a gloo group goes, as with a
    ``DistributedDataParallel`` at the end of ``main``, its destructor waits under the interpreter's lock for a thread
    that needs this lock to let go of its last tensor. A process that failed doesn't come here.
    """
    barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
