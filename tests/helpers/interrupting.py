"""Interrupts at every bytecode of an action."""

import contextlib
import sys

import torch

CONTEXTS = (contextlib.__file__, sys.modules[torch.no_grad.__module__].__file__)


class Interrupter:
    """Raises KeyboardInterrupt before one instruction of the given files, by tracing opcodes."""

    def __init__(self, files, at=None):
        self.files, self.at, self.seen = files, at, {}

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code is not self.at[0] if self.at else not code.co_filename.startswith(self.files):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self.trace

    def trace(self, frame, event, arg):
        if event == "opcode":
            place = (frame.f_code, frame.f_lasti)
            if place == self.at:
                raise KeyboardInterrupt  # which also ends the tracing
            self.seen.setdefault(place)
        return self.trace

    def run(self, action):
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes only if a frame asked for it before
        sys.settrace(self)
        try:
            action()
        finally:
            sys.settrace(None)


def interrupted_everywhere(action, files):
    """Run the action again and again, interrupted at each instruction that it executes in these files."""
    first = Interrupter(files)
    first.run(action)
    yield None
    for place in first.seen:
        with contextlib.suppress(KeyboardInterrupt):  # some are executed the first time only
            Interrupter(files, place).run(action)
        yield place
