"""A link that does nothing until somebody waits for it: then what it was told so far, in order.

Streams may be as late as that. So what is overwritten before the link has read it, or computed with
before it was waited for, becomes wrong numbers."""

import threading
import time
from contextlib import contextmanager
from itertools import count

from moelab.offloading.link import Link


class Lazy(Link):
    """`log` : what happened to slots: "copy", "send" or "leave"; to chunks: their kind."""

    def __init__(self, device):
        super().__init__(device)
        self.log, self.told, self.done = [], [], []
        self.lock, self.numbers, self.coming = threading.RLock(), count(), {}

    @contextmanager
    def into(self, slot):
        self.log.append(("copy", slot))
        yield

    def behind(self, what, do, nbytes=0, slot=None):
        with self.lock:
            self.log.append((what[1] if slot is None else "send", slot))
            ticket = Ticket(self, next(self.numbers))
            self.told.append((ticket.number, what, do, nbytes))
            if slot is not None:
                self.coming[slot] = ticket.number
            return ticket

    def until(self, number):
        with self.lock:
            while self.told and self.told[0][0] <= number:
                _, what, do, nbytes = self.told.pop(0)
                start = time.perf_counter()
                do()
                self.done.append((what, start, time.perf_counter(), nbytes))

    def arrive(self, slots):
        for slot in slots:
            self.until(self.coming.pop(slot, -1))

    def rest(self):
        self.until(float("inf"))

    def landed(self):
        while self.done:
            yield self.done.pop(0)

    def leave(self, slots):
        self.log += [("leave", slot) for slot in slots]


class Ticket:
    """What stands for an event of a stream."""

    def __init__(self, link, number):
        self.link, self.number = link, number

    def synchronize(self):
        self.link.until(self.number)
