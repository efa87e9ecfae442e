"""What a template process and its owner say to each other over the control socket.

first    = a frame with the factory's argument   -> a frame: b"R", or b"B" and the reason
control  = b"F" and one descriptor               -> b"P" u32 process id
         | b"W" u32 process id                   -> b"S" i32 exit status (negative: a signal)
"""

import struct

READY, BROKEN = b"R", b"B"
FORK, FORKED = b"F", b"P"
WAIT, ENDED = b"W", b"S"
PID = struct.Struct("<I")
STATUS = struct.Struct("<i")
#: Exit status of a child that Python found to be out of memory.
MEMORY_EXIT = 86
