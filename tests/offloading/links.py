"""A link without a GPU: `Link` itself, over two streams that do what they are told late, in an order
that is drawn, and as soon as somebody waits for it.

What is computed is the CPU's, at once: so the stream that computes waits where a GPU's would
remember to."""

import random
import threading
from collections import deque

import torch

from moelab.offloading.link import Link


class Event:
    def __init__(self, device=None):
        self.device, self.done = device, device is None

    def query(self):
        if not self.done:
            self.device.run(self.device.chance.randrange(3))
        return self.done

    def synchronize(self):
        while not self.done:
            with self.device.lock:
                assert self.done or self.device.run(1), "two streams wait for each other"

    def elapsed_time(self, end):
        return 1e-3


class Late:
    """A stream."""

    def __init__(self, device):
        self.device, self.todo = device, deque()

    def wait_event(self, event):
        self.todo.append((lambda: event.done, lambda: None))

    def record_event(self, event=None):
        event = Event(self.device) if event is None else event
        self.todo.append((lambda: True, lambda: setattr(event, "done", True)))
        return event

    def synchronize(self):
        self.record_event().synchronize()


class AtOnce:
    def wait_event(self, event):
        event.synchronize()

    def record_event(self, event=None):
        return Event()

    def synchronize(self):
        pass


class Device:
    def __init__(self, seed):
        self.chance, self.streams, self.lock = random.Random(seed), [], threading.RLock()

    def run(self, n):
        """Do so many things that can be done; False if there is none."""
        with self.lock:
            for _ in range(n):
                able = [of for of in self.streams if of.todo and of.todo[0][0]()]
                if not able:
                    return False
                self.chance.choice(able).todo.popleft()[1]()
        return True


class Delayed(Link):
    """`log` : what was done, "send" of what was read, "read" of pinned memory, "recover", "back" or
    "leave"."""

    def __init__(self, device, seed=0):
        self.gpu, self.log = Device(seed), []
        super().__init__(device)

    def new_stream(self):
        self.gpu.streams.append(Late(self.gpu))
        return self.gpu.streams[-1]

    def now(self):
        self.gpu.run(self.gpu.chance.randrange(3))
        return AtOnce()

    def run(self, stream, do):
        begin, end = Event(self.gpu), Event(self.gpu)
        stream.record_event(begin)
        stream.todo.append((lambda: True, torch.inference_mode()(do)))
        stream.record_event(end)
        self.gpu.run(self.gpu.chance.randrange(3))
        return begin, end

    def behind(self, what, *given):
        self.log.append(what[1])
        return super().behind(what, *given)

    def take_back(self, *given):
        self.log.append("back")
        return super().take_back(*given)

    def leave(self, slot):
        self.log.append("leave")
        return super().leave(slot)
