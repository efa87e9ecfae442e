"""Define the control socket's messages between a template process and its owner.

    first = a frame with the factory's argument    -> a frame: b"R", or b"B" and the reason
    b"F" u32 child, and one descriptor: fork       -> nothing
    b"K" u32 child: kill it                        -> nothing
    b"W" u32 child: it has closed its descriptor   -> i32 exit status (negative: a signal)
    b"P" u32 child: its process id                 -> i32, 0 when there is none

The owner chooses the numbers of children, so that it need not wait for a fork.
"""

import struct

READY, BROKEN = b"R", b"B"
FORK, KILL, WAIT, PID = b"F", b"K", b"W", b"P"
COMMAND_FORMAT = struct.Struct("<cI")
ANSWER_FORMAT = struct.Struct("<i")
#: Exit status of a child that Python found to be out of memory.
OUT_OF_MEMORY_STATUS = 86
#: Answer to `WAIT` for a child that could not be forked.
NO_CHILD = 1 << 20
