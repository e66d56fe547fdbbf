"""A GPU that is nothing but clocks, one a stream, in place of `torch.cuda`: streams and events keep
the order that CUDA's documentation promises, and everything takes as long as it is said to."""

from contextlib import contextmanager


class Stream:
    def __init__(self, device=None):
        self.now = 0.0

    def wait_event(self, event):
        self.now = max(self.now, event.at)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def synchronize(self):
        pass


class Event:
    def __init__(self, enable_timing=False):
        self.at = None

    def record(self, stream):
        self.at = stream.now

    def query(self):
        return self.at is not None

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Cuda:
    """`torch.cuda`, of what a link uses; `spend` is what a kernel or a copy does."""

    Stream, Event = Stream, Event

    def __init__(self):
        self.compute = self.current = Stream()

    def current_stream(self, device=None):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def spend(self, seconds):
        self.current.now += seconds
